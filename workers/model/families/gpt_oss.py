"""gpt-oss: attention with sinks, every other layer with a window, and experts with a clamped activation,
which are published quantized to MXFP4."""

from __future__ import annotations

from workers.model.families.expert_traits import ExpertNames, ExpertTraits
from workers.model.families.family import Family

FAMILY = Family(
    "gpt_oss",
    "gpt-oss-20b and 120b",
    ("GptOssForCausalLM",),
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "num_experts_per_tok": 4,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    has_sinks=True,
    is_norm_rounded_first=False,
    windows="pattern",
    experts=ExpertTraits(
        "softmax_chosen",
        ExpertNames(
            router="router.weight",
            router_bias="router.bias",
            gate_up_bias="experts.gate_up_proj_bias",
            gate_bias="experts.gate_proj_bias",
            up_bias="experts.up_proj_bias",
            down_bias="experts.down_proj_bias",
            is_transposed=True,
        ),
        num_experts=128,
        size_key="intermediate_size",
        gate="clamped_swiglu",
        quantization="mxfp4",
    ),
)
