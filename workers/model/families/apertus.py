"""Apertus: xIELU without a gate, and normalized heads."""

from __future__ import annotations

from workers.model.families.family import Family, LayerNorms

FAMILY = Family(
    "apertus",
    "Apertus",
    ("ApertusForCausalLM",),
    defaults={"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "hidden_act": "xielu"},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    norms=LayerNorms("attention_layernorm", "", "feedforward_layernorm"),
    is_gated=False,
)
