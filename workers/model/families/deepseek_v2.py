"""DeepSeek V2: latent attention, and experts beside some that all tokens share."""

from __future__ import annotations

from workers.model.families.expert_traits import ExpertNames, ExpertTraits
from workers.model.families.family import Family, Rotary

FAMILY = Family(
    "deepseek_v2",
    "DeepSeek V2, V2-Lite, Coder V2",
    ("DeepseekV2ForCausalLM",),
    defaults={
        "max_position_embeddings": 2048,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "topk_method": "greedy",
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    rotary=Rotary(is_interleaved=True),
    experts=ExpertTraits(
        "softmax",
        ExpertNames(shared="shared_experts."),
        num_experts=64,
        layers="after_first",
        scale_key="routed_scaling_factor",
        has_groups=True,
        group_score="best",
        num_shared_key="n_shared_experts",
    ),
    has_latent_attention=True,
)
