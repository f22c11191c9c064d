"""Qwen1.5 and Qwen2 with experts: one more expert, behind a gate, is that of all tokens."""

from __future__ import annotations

from workers.model.families.expert_traits import ExpertNames, ExpertTraits
from workers.model.families.family import Family

FAMILY = Family(
    "qwen2_moe",
    "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    ("Qwen2MoeForCausalLM",),
    defaults={
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "qkv_bias": True,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    qkv_bias="qkv_bias",
    windows="alternating",
    experts=ExpertTraits(
        "softmax",
        ExpertNames(shared="shared_expert.", shared_gate="shared_expert_gate.weight"),
        num_experts=60,
        layers="stepped",
        is_normalized="norm_topk_prob",
        shared_size_key="shared_expert_intermediate_size",
    ),
)
