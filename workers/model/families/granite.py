"""Granite 3 without experts: Llama's shape, with values that are scaled."""

from __future__ import annotations

from workers.model.families.family import Family, Multipliers

FAMILY = Family(
    "granite",
    "Granite 3 without experts",
    ("GraniteForCausalLM",),
    defaults={"max_position_embeddings": 2048},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    multipliers=Multipliers(
        embeddings="embedding_multiplier",
        residuals="residual_multiplier",
        attention_scores="attention_multiplier",
        logits="logits_scaling",
    ),
)
