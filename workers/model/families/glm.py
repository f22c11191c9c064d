"""GLM-4 9B as its first checkpoints have it."""

from __future__ import annotations

from workers.model.families.family import Family, Rotary

FAMILY = Family(
    "glm",
    "GLM-4 9B of 2024, GLM-Edge",
    ("GlmForCausalLM",),
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
)
