"""Apertus: xIELU without a gate, and normalized heads."""

from __future__ import annotations

from workers.model.families.family import Family, NormNames

FAMILY = Family(
    "apertus",
    "Apertus",
    ("ApertusForCausalLM",),
    defaults={
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "hidden_act": "xielu",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    norms=NormNames("attention_layernorm", "", "feedforward_layernorm"),
    is_gated=False,
)
