"""Phi-3 and Phi-4 with plain rotary embedding: Llama's shape in fused tensors."""

from __future__ import annotations

from workers.model.families.family import Family

FAMILY = Family(
    "phi3",
    "Phi-3 with 4k of context, Phi-4",
    ("Phi3ForCausalLM",),
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    windows="all",
    is_fused=True,
)
