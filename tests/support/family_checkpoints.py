"""Write random checkpoints of every family by `transformers`: names, shapes and defaults are its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import transformers
from hybrid_variants import HYBRID_VARIANTS
from torch import nn

from workers.model.families.known_families import NAME_TO_FAMILY

SHAPES: tuple[dict[str, Any], ...] = (
    {"hidden_size": 66, "intermediate_size": 130, "num_attention_heads": 6, "num_key_value_heads": 2},
    {"hidden_size": 48, "intermediate_size": 97, "num_attention_heads": 3, "num_key_value_heads": 1},
    {"hidden_size": 80, "intermediate_size": 111, "num_attention_heads": 4, "num_key_value_heads": 4},
)
HEAD_DIMS = (16, 32, 24)
COMMON: dict[str, Any] = {
    "vocab_size": 211,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Gemma 4 with heads of two sizes, keys as values, layers of both kinds that share KV, and inputs of layers.
GEMMA4_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 6,
    "num_global_key_value_heads": 3,
    "attention_k_eq_v": True,
    "global_head_dim": 24,
    "sliding_window": 20,
    "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 7,
    "vocab_size_per_layer_input": 300,
}
# Yarn of latent attention, over a context that the prompts of tests are longer than.
_LATENT_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def latent(**keys: int | None) -> dict[str, Any]:
    """Return the keys of latent attention, with `keys` for some of them."""
    return {"q_lora_rank": 29, "kv_lora_rank": 26} | keys


_TWO_IN_THREE = ("sliding_attention", "sliding_attention", "full_attention")
# Keys that each family's shapes have beside these; those that name no family's defaults cross its windows.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": ({}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}),
    "mistral": ({}, {"sliding_window": 24}, {"sliding_window": None}),
    "qwen2": ({}, {"tie_word_embeddings": True}, {"use_sliding_window": True, "sliding_window": 21}),
    "qwen3": ({}, {"tie_word_embeddings": True}, {"attention_bias": True}),
    "qwen3_moe": (
        {"moe_intermediate_size": 37, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
        {"moe_intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 1, "mlp_only_layers": [1]},
        {
            "moe_intermediate_size": 33,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe": (
        {
            "moe_intermediate_size": 37,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 51,
        },
        {
            "moe_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 3,
        },
        {
            "moe_intermediate_size": 33,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0, 2],
            "qkv_bias": False,
        },
    ),
    "mixtral": (
        {"num_local_experts": 7, "sliding_window": 24},
        {"num_local_experts": 5, "num_experts_per_tok": 1},
        {"num_local_experts": 4, "num_experts_per_tok": 4, "tie_word_embeddings": True},
    ),
    "minimax_m2": (
        {"num_local_experts": 7, "num_experts_per_tok": 3, "rotary_dim": 8},
        {"num_local_experts": 5, "num_experts_per_tok": 1},
        {"num_local_experts": 4, "num_experts_per_tok": 4, "rotary_dim": 12},
    ),
    "gpt_oss": (
        {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 20, "swiglu_limit": 0.8},
        {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 9, "swiglu_alpha": 1.1},
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 33,
            "tie_word_embeddings": True,
        },
    ),
    "phimoe": (
        {"num_local_experts": 7, "lm_head_bias": True, "router_jitter_noise": 0.3},
        {"num_local_experts": 5, "attention_bias": True, "sliding_window": 24},
        {"num_local_experts": 2, "router_jitter_noise": 2.0},
    ),
    "olmoe": (
        {"num_experts": 7, "num_experts_per_tok": 3},
        {"num_experts": 5, "num_experts_per_tok": 1, "norm_topk_prob": True},
        {"num_experts": 4, "num_experts_per_tok": 4, "attention_bias": True},
    ),
    "granitemoe": (
        {
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.15,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.5,
        },
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "attention_bias": True,
        },
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "attention_multiplier": 0.4,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5_moe": (
        {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 37},
        {
            "moe_num_experts": 5,
            "moe_k": 1,
            "moe_intermediate_size": 20,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
        },
        {
            "moe_num_experts": 4,
            "moe_k": 4,
            "moe_intermediate_size": 33,
            "moe_num_shared_experts": 1,
            "moe_layer_end_index": 2,
            "tie_word_embeddings": False,
        },
    ),
    "glm4_moe": (
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 37,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
        },
        {
            "n_routed_experts": 5,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 20,
            "attention_bias": True,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
        },
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 33,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
    ),
    "gemma": ({}, {"tie_word_embeddings": False}, {"attention_bias": True}),
    "gemma2": (
        {"sliding_window": 20, "query_pre_attn_scalar": 40},
        {"sliding_window": 300, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        {"sliding_window": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3_text": (
        {"sliding_window": 20, "sliding_window_pattern": 2, "query_pre_attn_scalar": 40},
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {"sliding_window": 33, "final_logit_softcapping": 4.0, "attention_bias": True},
    ),
    "gemma4_text": (
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "global_head_dim": 48,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 230,
            "final_logit_softcapping": 4.0,
        },
        {
            "num_hidden_layers": 7,
            "sliding_window": 9,
            "layer_types": [*_TWO_IN_THREE, *_TWO_IN_THREE, "full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 5,
            "vocab_size_per_layer_input": 211,
        },
        {
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "global_head_dim": 40,
            "hidden_size_per_layer_input": 0,
            "attention_bias": True,
            "final_logit_softcapping": 6.0,
        },
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 48,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 37,
        },
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 5,
            "vocab_size_per_layer_input": 211,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 1,
            "moe_intermediate_size": 20,
        },
        {
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "global_head_dim": 40,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 33,
        },
    ),
    "gemma4_unified_text": (
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
        },
        {"sliding_window": 9, "global_head_dim": 64, "tie_word_embeddings": False},
        {
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "global_head_dim": 24,
            "num_kv_shared_layers": 2,
        },
    ),
    "phi3": (
        {"sliding_window": 24},
        {"partial_rotary_factor": 0.75},
        {
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
                "long_factor": [1.0, 1.5, 3.0, 7.0, 12.0, 20.0],
            },
        },
    ),
    "granite": (
        {"attention_multiplier": 0.15, "residual_multiplier": 0.6, "logits_scaling": 1.5},
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "attention_bias": True},
        {"attention_multiplier": 0.4, "tie_word_embeddings": True, "mlp_bias": True},
    ),
    "smollm3": (
        {"no_rope_layer_interval": 2},
        {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
    ),
    "olmo2": ({}, {"attention_bias": True}, {"tie_word_embeddings": True}),
    "olmo3": (
        {"sliding_window": 20},
        {
            "sliding_window": 9,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.2,
            },
        },
        {"sliding_window": 40, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
    ),
    "glm": ({}, {"attention_bias": False}, {"partial_rotary_factor": 1.0}),
    "glm4": ({}, {"attention_bias": False}, {"partial_rotary_factor": 0.25}),
    "glm4_moe_lite": (
        {
            **latent(qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=16),
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 37,
        },
        {
            **latent(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=21),
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "n_group": 3,
            "topk_group": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "routed_scaling_factor": 1.5,
            "rope_interleave": False,
        },
        {
            **latent(qk_nope_head_dim=14, qk_rope_head_dim=10, v_head_dim=18),
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 33,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2": (
        {
            **latent(q_lora_rank=None, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=9),
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 37,
            "first_k_dense_replace": 1,
            "rope_scaling": _LATENT_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {
            **latent(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=21),
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "attention_bias": True,
        },
        {
            **latent(qk_nope_head_dim=14, qk_rope_head_dim=10, v_head_dim=24),
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 33,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "rope_scaling": _LATENT_YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek_v3": (
        {
            **latent(qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=9),
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 37,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_scaling": _LATENT_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {
            **latent(q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=21),
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.446,
            "rms_norm_eps": 0.02,
            "rope_scaling": _LATENT_YARN | {"beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 0.9},
        },
        {
            **latent(qk_nope_head_dim=14, qk_rope_head_dim=10, v_head_dim=18),
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 33,
            "n_group": 2,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "attention_bias": True,
        },
    ),
    "exaone4": (
        {"sliding_window": 20},
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "apertus": ({}, {"attention_bias": True}, {"tie_word_embeddings": True}),
    "seed_oss": ({}, {"attention_bias": False, "mlp_bias": True}, {"attention_out_bias": True}),
    "cohere": (
        {"logit_scale": 0.8},
        {"logit_scale": 1.7, "use_qk_norm": True, "attention_bias": True},
        {"logit_scale": 0.6, "use_qk_norm": True, "tie_word_embeddings": False},
    ),
    "cohere2": (
        {"logit_scale": 0.8, "sliding_window": 20},
        {"logit_scale": 1.7, "sliding_window": 9, "sliding_window_pattern": 2, "attention_bias": True},
        {
            "logit_scale": 0.6,
            "sliding_window": 33,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "tie_word_embeddings": False,
        },
    ),
    "stablelm": (
        {"use_qkv_bias": True},
        {"use_parallel_residual": True, "qk_layernorm": True},
        {"qk_layernorm": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
}
# Families whose heads are as wide as `hidden_size` says.
WITHOUT_HEAD_DIM = ("phi3", "cohere2", "stablelm", "olmoe", "lfm2", "lfm2_moe")
# Families whose heads of keys and values are expanded from a latent, one for each head of queries.
LATENT = tuple(name for name, family in NAME_TO_FAMILY.items() if family.has_latent_attention)
CASES: dict[str, dict[str, Any]] = {
    f"{family}-{number}": {"family": family, "head_dim": head_dim, **shape, **variant}
    for family, variants in (VARIANTS | HYBRID_VARIANTS).items()
    for number, (variant, shape, head_dim) in enumerate(
        zip(variants, itertools.cycle(SHAPES), itertools.cycle(HEAD_DIMS)), 1
    )
}


def write_family_checkpoint(
    path: Path, family: str, *, seed: int = 0, dtype: str = "float32", **keys: Any
) -> None:
    """Write a checkpoint of a family, with `keys` of its config.json, into the folder `path`. Weights are
    such that attention, norms and gates all tell in the logits."""
    given = COMMON | keys
    if family in WITHOUT_HEAD_DIM:
        given["hidden_size"] = given.pop("head_dim") * given["num_attention_heads"]
    if family in LATENT:
        given = given | {"num_key_value_heads": given["num_attention_heads"]}
        del given["head_dim"]
    config = transformers.AutoConfig.for_model(family, **given, dtype=dtype)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        _draw(name, parameter)
        # Scores that nothing scales would differ so much that rounding decides what is attended to.
        if NAME_TO_FAMILY[family].score_scale and name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data.mul_(len(parameter) ** -0.25)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.7, 1.3)
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(0.0, 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(path)


@torch.no_grad()
def _draw(name: str, parameter: nn.Parameter) -> None:
    if name.endswith("dt_bias"):
        parameter.normal_(-2.0, 1.0)
    elif "norm" in name:
        mean = float(parameter.mean() > 0.5)
        parameter.normal_(mean, 0.2)
    elif parameter.dim() == 1:
        parameter.normal_(0.0, 0.3)
    else:
        gain = 2.0 if "embed" in name or "lm_head" in name else 1.2
        parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5)
