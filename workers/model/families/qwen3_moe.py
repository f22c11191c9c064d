"""Qwen3 with experts."""

from __future__ import annotations

from workers.model.families.expert_traits import ExpertTraits
from workers.model.families.family import Family

FAMILY = Family(
    "qwen3_moe",
    "Qwen3 with experts: 30B-A3B, 235B-A22B, Coder",
    ("Qwen3MoeForCausalLM",),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    windows="switched",
    experts=ExpertTraits("softmax", num_experts=128, layers="stepped", is_normalized="norm_topk_prob"),
)
