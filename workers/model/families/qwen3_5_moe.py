"""Qwen3.5 and 3.6 with experts, also inside of their models of text and images."""

from __future__ import annotations

import dataclasses

from workers.model.families import qwen3_5, qwen3_next
from workers.model.families.expert_traits import ExpertTraits

FAMILY = dataclasses.replace(
    qwen3_5.FAMILY,
    name="qwen3_5_moe_text",
    models="The text of Qwen3.5 and Qwen3.6 with experts: 35B-A3B, 122B-A10B, 397B-A17B",
    architectures=("Qwen3_5MoeForCausalLM",),
    defaults={
        **qwen3_5.FAMILY.defaults,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 8,
    },
    experts=ExpertTraits(
        "softmax",
        qwen3_next.SHARED_NAMES,
        num_experts=256,
        is_normalized=True,
        shared_size_key="shared_expert_intermediate_size",
    ),
)
