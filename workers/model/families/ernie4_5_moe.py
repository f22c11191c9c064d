"""ERNIE 4.5 with experts: interleaved rotation, experts that are chosen by corrected probabilities, and some
that all tokens share."""

from __future__ import annotations

from workers.model.families.expert_traits import ExpertNames, ExpertTraits
from workers.model.families.family import Family, Rotary

FAMILY = Family(
    "ernie4_5_moe",
    "ERNIE 4.5 with experts: 21B-A3B, 300B-A47B",
    ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_norm_min": 1e-12,
    },
    qkv_bias="use_bias",
    output_bias="use_bias",
    mlp_bias="use_bias",
    head_bias="use_bias",
    rotary=Rotary(is_interleaved=True),
    experts=ExpertTraits(
        "softmax",
        ExpertNames(correction="moe_statics.e_score_correction_bias", shared="shared_experts."),
        num_experts=64,
        num_chosen_key="moe_k",
        layers="interval",
        is_normalized=True,
        least_sum_key="moe_norm_min",
        num_shared_key="moe_num_shared_experts",
    ),
)
