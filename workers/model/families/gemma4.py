"""Gemma 4, also inside of Gemma 4 with images and sound: heads of two sizes, normalized values, inputs of
each layer, layers that share the KV of earlier ones, and experts beside the feed-forward."""

from __future__ import annotations

from workers.model.families.expert_traits import BranchNormNames, ExpertNames, ExpertTraits
from workers.model.families.family import Family, Rotary
from workers.model.families.gemma2 import SANDWICH_NORMS

FAMILY = Family(
    "gemma4_text",
    "Gemma 4 E2B, E4B, 31B and 26B-A4B, also their text with images and sound",
    ("Gemma4ForCausalLM",),
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "tie_word_embeddings": True,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    has_value_norm=True,
    windows="pattern",
    is_last_layer_full=True,
    rotary=Rotary(is_by_kind=True),
    norms=SANDWICH_NORMS,
    is_norm_rounded_first=False,
    activation="hidden_activation",
    is_embedding_scaled=True,
    score_scale=1.0,
    has_logits_softcap=True,
    has_layer_shapes=True,
    experts=ExpertTraits(
        "softmax",
        ExpertNames(
            block="",
            router="router.proj.weight",
            router_norm="router.scale",
            expert_scale="router.per_expert_scale",
        ),
        num_chosen_key="top_k_experts",
        layers="enabled",
        is_normalized=True,
        branch_norms=BranchNormNames(
            "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
        ),
    ),
)
