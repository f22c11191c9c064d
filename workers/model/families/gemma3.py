"""Gemma 3, also inside of Gemma 3 with images: Gemma 2 with normalized heads and two rotary bases."""

from __future__ import annotations

from workers.model.families.family import Family, Rotary
from workers.model.families.gemma2 import SANDWICH_NORMS

FAMILY = Family(
    "gemma3_text",
    "Gemma 3, and the text of Gemma 3 with images",
    ("Gemma3ForCausalLM",),
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    windows="pattern",
    rotary=Rotary(sliding_theta="rope_local_base_freq", is_context_stretched=True),
    norms=SANDWICH_NORMS,
    norm_offset=1.0,
    is_norm_rounded_first=False,
    activation="hidden_activation",
    is_embedding_scaled=True,
    query_scalar="query_pre_attn_scalar",
    has_softcaps=True,
)
