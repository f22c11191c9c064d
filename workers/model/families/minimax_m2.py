"""MiniMax M2: heads of which a part is rotated, norms of all queries and keys of a token, and experts that
are chosen by a sigmoid."""

from __future__ import annotations

import dataclasses

from workers.model.families.expert_traits import ExpertTraits
from workers.model.families.family import Family, Rotary
from workers.model.families.mixtral import NUMBERED

FAMILY = Family(
    "minimax_m2",
    "MiniMax M2",
    ("MiniMaxM2ForCausalLM",),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5_000_000.0,
        "num_experts_per_tok": 8,
    },
    qk_norm="row",
    rotary=Rotary(partial_factor=1.0, size_key="rotary_dim"),
    experts=ExpertTraits(
        "sigmoid",
        dataclasses.replace(NUMBERED, correction="e_score_correction_bias"),
        num_experts=256,
        size_key="intermediate_size",
        is_normalized=True,
    ),
)
