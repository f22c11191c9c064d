"""StableLM: LayerNorms with bias, and a quarter of each head rotated."""

from __future__ import annotations

from workers.model.families.family import Family, Rotary

FAMILY = Family(
    "stablelm",
    "StableLM 3B, StableLM 2, Stable Code 3B",
    ("StableLmForCausalLM",),
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
    },
    qkv_bias="use_qkv_bias",
    qk_norm="own",
    has_qk_norm="qk_layernorm",
    qk_norm_names=("q_layernorm.norms.{head}", "k_layernorm.norms.{head}"),
    rotary=Rotary(partial_factor=0.25),
    is_parallel="use_parallel_residual",
    is_layer_norm=True,
    has_norm_bias=True,
    norm_eps="layer_norm_eps",
)
