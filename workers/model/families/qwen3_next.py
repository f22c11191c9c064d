"""Qwen3-Next: layers of the gated delta rule, and every fourth of gated attention, all with experts."""

from __future__ import annotations

from workers.model.families.expert_traits import ExpertNames, ExpertTraits
from workers.model.families.family import Family, Rotary
from workers.model.state.delta_shape import DeltaTraits

SHARED_NAMES = ExpertNames(shared="shared_expert.", shared_gate="shared_expert_gate.weight")

FAMILY = Family(
    "qwen3_next",
    "Qwen3-Next 80B-A3B",
    ("Qwen3NextForCausalLM",),
    defaults={
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    has_output_gate=True,
    rotary=Rotary(partial_factor=0.25),
    norm_offset=1.0,
    is_norm_rounded_first=False,
    state=DeltaTraits("linear_attn.", is_fused=True),
    experts=ExpertTraits(
        "softmax",
        SHARED_NAMES,
        num_experts=512,
        layers="stepped",
        is_normalized="norm_topk_prob",
        shared_size_key="shared_expert_intermediate_size",
    ),
    passed_over=("mtp.",),
)
