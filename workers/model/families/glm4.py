"""GLM-4 of 2025: GLM with norms before and after."""

from __future__ import annotations

from workers.model.families.family import Family, NormNames, Rotary

FAMILY = Family(
    "glm4",
    "GLM-4 0414, GLM-Z1",
    ("Glm4ForCausalLM",),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
    qkv_bias="attention_bias",
    rotary=Rotary(partial_factor=0.5, is_interleaved=True),
    is_gate_up_fused=True,
    norms=NormNames(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    ),
)
