"""Gemma 1, CodeGemma."""

from __future__ import annotations

from workers.model.families.family import Family

FAMILY = Family(
    "gemma",
    "Gemma 1, CodeGemma",
    ("GemmaForCausalLM",),
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    norm_offset=1.0,
    is_norm_rounded_first=False,
    # The first checkpoints say so, and were trained with the approximation.
    activation_aliases={"gelu": "gelu_pytorch_tanh"},
    is_embedding_scaled=True,
)
