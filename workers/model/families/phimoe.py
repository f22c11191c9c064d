"""Phi-3.5-MoE: LayerNorms, and two experts of which each is weighed by itself."""

from __future__ import annotations

from workers.model.families.expert_traits import ExpertTraits
from workers.model.families.family import Family
from workers.model.families.mixtral import NUMBERED

FAMILY = Family(
    "phimoe",
    "Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE",
    ("PhiMoEForCausalLM", "PhimoeForCausalLM"),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    head_bias="lm_head_bias",
    windows="all",
    is_layer_norm=True,
    has_norm_bias=True,
    experts=ExpertTraits(
        "sparsemixer",
        NUMBERED,
        num_experts=16,
        size_key="intermediate_size",
        jitter_key="router_jitter_noise",
    ),
)
