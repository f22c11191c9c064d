"""Mistral 7B, NeMo, Small and Ministral, also inside of Mistral 3 with images."""

from __future__ import annotations

from workers.model.families.family import Family

FAMILY = Family(
    "mistral",
    "Mistral 7B, NeMo, Small, Ministral 8B, and the text of Mistral 3",
    ("MistralForCausalLM",),
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    windows="all",
)
