"""Gemma 4 with one model for text, images and sound: the text model of Gemma 4 without inputs of each
layer."""

from __future__ import annotations

import dataclasses

from workers.model.families import gemma4

FAMILY = dataclasses.replace(
    gemma4.FAMILY,
    name="gemma4_unified_text",
    models="The text of Gemma 4 12B, one model of text, images and sound",
    architectures=("Gemma4UnifiedForCausalLM",),
    experts=None,
    defaults={
        **gemma4.FAMILY.defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
)
