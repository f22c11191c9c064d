"""Llama 2 and 3, and what has their shape: Yi, DeepSeek LLM, SmolLM2, TinyLlama."""

from __future__ import annotations

from workers.model.families.family import Family

FAMILY = Family(
    "llama",
    "Llama 2 and 3, SmolLM2, TinyLlama, Yi, DeepSeek LLM",
    ("LlamaForCausalLM",),
    defaults={"max_position_embeddings": 2048},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)
