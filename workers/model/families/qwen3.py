"""Qwen3 without experts."""

from __future__ import annotations

from workers.model.families.family import Family

FAMILY = Family(
    "qwen3",
    "Qwen3 without experts",
    ("Qwen3ForCausalLM",),
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    windows="switched",
)
