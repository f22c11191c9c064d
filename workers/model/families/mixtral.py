"""Mixtral: Mistral with experts."""

from __future__ import annotations

from workers.model.families.expert_traits import ExpertNames, ExpertTraits
from workers.model.families.family import Family

# As Mixtral and its successors name the products of an expert.
NUMBERED = ExpertNames(
    block="block_sparse_moe.",
    each_gate="experts.{expert}.w1.weight",
    each_up="experts.{expert}.w3.weight",
    each_down="experts.{expert}.w2.weight",
)

FAMILY = Family(
    "mixtral",
    "Mixtral 8x7B and 8x22B",
    ("MixtralForCausalLM",),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
    },
    windows="all",
    experts=ExpertTraits(
        "softmax", NUMBERED, num_experts=8, size_key="intermediate_size", is_normalized=True
    ),
)
