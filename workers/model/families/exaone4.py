"""EXAONE 4: norms of what layers add; where layers have windows, the others have no rotary embedding."""

from __future__ import annotations

from workers.model.families.family import Family, Rotary
from workers.model.families.olmo2 import OUTPUT_NORMS

FAMILY = Family(
    "exaone4",
    "EXAONE 4",
    ("Exaone4ForCausalLM",),
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    qk_norm="head",
    windows="pattern",
    rotary=Rotary(without="unless_sliding"),
    norms=OUTPUT_NORMS,
)
