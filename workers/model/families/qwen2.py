"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from workers.model.families.family import Family

FAMILY = Family(
    "qwen2",
    "Qwen2, Qwen2.5",
    ("Qwen2ForCausalLM",),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    qkv_bias=True,
    windows="switched",
)
