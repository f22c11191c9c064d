"""Keys of random checkpoints of families some of whose layers keep a recurrent state."""

from __future__ import annotations

from typing import Any

# Heads of the gated delta rule.
DELTA_HEADS: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 32,
}
# In prompts, and not in what follows, transformers takes no smaller time steps than this of Nemotron-H.
_NO_LEAST_STEP: dict[str, Any] = {"time_step_min": 1e-30}
# Keys that each family's shapes have beside those of `family_checkpoints`.
HYBRID_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen3_next": (
        {
            **DELTA_HEADS,
            "moe_intermediate_size": 37,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 51,
            "partial_rotary_factor": 0.5,
        },
        {
            **DELTA_HEADS,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "moe_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "layer_types": ["full_attention", *["linear_attention"] * 3],
        },
        {
            **DELTA_HEADS,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 2,
            "moe_intermediate_size": 33,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 64,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_text": (
        {**DELTA_HEADS, "partial_rotary_factor": 0.5},
        {
            **DELTA_HEADS,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
        },
        {**DELTA_HEADS, "linear_num_value_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_text": (
        {
            **DELTA_HEADS,
            "moe_intermediate_size": 37,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 51,
        },
        {
            **DELTA_HEADS,
            "linear_num_key_heads": 2,
            "moe_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "shared_expert_intermediate_size": 20,
            "attention_bias": True,
        },
        {
            **DELTA_HEADS,
            "moe_intermediate_size": 33,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 64,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": (
        {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 7},
        {
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
        },
        {"full_attn_idxs": [2], "tie_word_embeddings": False, "conv_L_cache": 2, "conv_bias": True},
    ),
    "granitemoehybrid": (
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mamba_n_heads": 12,
            "mamba_d_state": 18,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 51,
            "attention_multiplier": 0.15,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.5,
        },
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "mamba_n_heads": 6,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "mamba_d_conv": 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 97,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "attention_bias": True,
            "position_embedding_type": "rope",
            "mamba_chunk_size": 32,
        },
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_state": 24,
            "mamba_n_groups": 2,
            "mamba_conv_bias": False,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.4,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": (
        {
            **_NO_LEAST_STEP,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 11,
            "ssm_state_size": 18,
            "n_groups": 4,
        },
        {
            **_NO_LEAST_STEP,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "conv_kernel": 3,
            "mlp_bias": True,
            "use_conv_bias": False,
        },
        {
            **_NO_LEAST_STEP,
            "layers_block_type": ["mlp", "linear_attention", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 20,
            "ssm_state_size": 24,
            "n_groups": 2,
            "use_bias": True,
        },
    ),
}
