"""OLMo 3: OLMo 2 with windows in three of four layers."""

from __future__ import annotations

from workers.model.families.family import Family, Rotary
from workers.model.families.olmo2 import OUTPUT_NORMS

FAMILY = Family(
    "olmo3",
    "OLMo 3",
    ("Olmo3ForCausalLM",),
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="row",
    windows="pattern",
    rotary=Rotary(sliding_theta="rope_theta"),
    norms=OUTPUT_NORMS,
    is_norm_rounded_first=False,
)
