"""LFM2 with experts, which are chosen by corrected sigmoids, in all layers but the first."""

from __future__ import annotations

import dataclasses

from workers.model.families import lfm2
from workers.model.families.expert_traits import ExpertNames, ExpertTraits

FAMILY = dataclasses.replace(
    lfm2.FAMILY,
    name="lfm2_moe",
    models="LFM2 with experts: 8B-A1B",
    architectures=("Lfm2MoeForCausalLM",),
    defaults={
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "first_k_dense_replace": 2,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    key_aliases={"tie_embedding": "tie_word_embeddings", "num_dense_layers": "first_k_dense_replace"},
    experts=ExpertTraits(
        "sigmoid",
        ExpertNames(
            block="feed_forward.",
            correction="expert_bias",
            each_gate="experts.{expert}.w1.weight",
            each_up="experts.{expert}.w3.weight",
            each_down="experts.{expert}.w2.weight",
        ),
        num_experts=32,
        layers="after_first",
        is_normalized="norm_topk_prob",
        sum_offset=1e-6,
        scale_key="routed_scaling_factor",
    ),
)
