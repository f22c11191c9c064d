"""Qwen3.5 and 3.6, also inside of their models of text and images: layers as those of Qwen3-Next, but without
experts."""

from __future__ import annotations

import dataclasses

from workers.model.families import qwen3_next
from workers.model.families.family import Rotary
from workers.model.state.delta_shape import DeltaTraits

FAMILY = dataclasses.replace(
    qwen3_next.FAMILY,
    name="qwen3_5_text",
    models="The text of Qwen3.5 and Qwen3.6 without experts: 0.8B to 27B",
    architectures=("Qwen3_5ForCausalLM",),
    defaults={
        **qwen3_next.FAMILY.defaults,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    rotary=Rotary(partial_factor=0.25, has_sections=True),
    state=DeltaTraits("linear_attn."),
    experts=None,
)
