"""Command-R7B and Command A: Command-R with windows, and no rotary embedding where there is none."""

from __future__ import annotations

from workers.model.families.family import Family, Multipliers, Rotary

FAMILY = Family(
    "cohere2",
    "Command-R7B, Command A",
    ("Cohere2ForCausalLM",),
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    windows="pattern",
    rotary=Rotary(is_interleaved=True, without="unless_sliding"),
    is_parallel=True,
    is_layer_norm=True,
    norm_eps="layer_norm_eps",
    multipliers=Multipliers(logits_scale="logit_scale"),
)
