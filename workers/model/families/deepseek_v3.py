"""DeepSeek V3: latent attention, and experts that are chosen by corrected sigmoids."""

from __future__ import annotations

import dataclasses

from workers.model.families.expert_traits import ExpertNames, ExpertTraits
from workers.model.families.family import Family, Rotary

# Experts that are chosen by sigmoids with a bias of each, beside some that all tokens share.
CORRECTED = ExpertTraits(
    "sigmoid",
    ExpertNames(correction="gate.e_score_correction_bias", shared="shared_experts."),
    layers="after_first",
    is_normalized="norm_topk_prob",
    sum_offset=1e-20,
    scale_key="routed_scaling_factor",
    has_groups=True,
    num_shared_key="n_shared_experts",
)

FAMILY = Family(
    "deepseek_v3",
    "DeepSeek V3, V3.1 and R1",
    ("DeepseekV3ForCausalLM",),
    defaults={
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    rotary=Rotary(is_interleaved="rope_interleave"),
    experts=dataclasses.replace(CORRECTED, num_experts=256),
    has_latent_attention=True,
    extra_layers_key="num_nextn_predict_layers",
)
