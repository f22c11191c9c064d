"""Gemma 2: norms before and after, capped scores and logits, every other layer with a window."""

from __future__ import annotations

from workers.model.families.family import Family, NormNames

SANDWICH_NORMS = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

FAMILY = Family(
    "gemma2",
    "Gemma 2",
    ("Gemma2ForCausalLM",),
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    windows="pattern",
    norms=SANDWICH_NORMS,
    norm_offset=1.0,
    is_norm_rounded_first=False,
    activation="hidden_activation",
    is_embedding_scaled=True,
    query_scalar="query_pre_attn_scalar",
    has_softcaps=True,
)
