"""GLM-4.7-Flash: the attention and the experts of DeepSeek V3."""

from __future__ import annotations

import dataclasses

from workers.model.families import deepseek_v3

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    name="glm4_moe_lite",
    models="GLM-4.7-Flash",
    architectures=("Glm4MoeLiteForCausalLM",),
    defaults={
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rope_interleave": True,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 1,
    },
    experts=dataclasses.replace(deepseek_v3.CORRECTED, num_experts=64, layers="named"),
)
