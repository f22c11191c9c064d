"""GLM-4.5 to 4.7: experts that are chosen by corrected sigmoids, after some layers without."""

from __future__ import annotations

import dataclasses

from workers.model.families.deepseek_v3 import CORRECTED
from workers.model.families.family import Family, Rotary

FAMILY = Family(
    "glm4_moe",
    "GLM-4.5, 4.5-Air, 4.6, 4.7",
    ("Glm4MoeForCausalLM",),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    qkv_bias="attention_bias",
    qk_norm="head",
    has_qk_norm="use_qk_norm",
    rotary=Rotary(partial_factor=0.5),
    experts=dataclasses.replace(CORRECTED, num_experts=128),
    extra_layers_key="num_nextn_predict_layers",
)
