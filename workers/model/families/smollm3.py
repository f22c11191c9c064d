"""SmolLM3: Llama with layers without rotary embedding."""

from __future__ import annotations

from workers.model.families.family import Family, Rotary

FAMILY = Family(
    "smollm3",
    "SmolLM3",
    ("SmolLM3ForCausalLM",),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    rotary=Rotary(without="listed"),
)
