"""Command-R and Aya: attention and feed-forward side by side, after one LayerNorm."""

from __future__ import annotations

from workers.model.families.family import Family, Multipliers, Rotary

FAMILY = Family(
    "cohere",
    "Command-R, Command-R+, Aya 23, Aya Expanse",
    ("CohereForCausalLM",),
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="own",
    has_qk_norm="use_qk_norm",
    rotary=Rotary(is_interleaved=True),
    # Positions of the checkpoints are those of a first stage of training.
    context_key="model_max_length",
    is_parallel=True,
    is_layer_norm=True,
    norm_eps="layer_norm_eps",
    multipliers=Multipliers(logits_scale="logit_scale"),
)
