"""Seed-OSS."""

from __future__ import annotations

from workers.model.families.family import Family

FAMILY = Family(
    "seed_oss",
    "Seed-OSS",
    ("SeedOssForCausalLM",),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    qkv_bias="attention_bias",
    output_bias="attention_out_bias",
    mlp_bias="mlp_bias",
)
