"""The keys of published config.json files about experts, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from workers.model.experts.mixture_shape import Clamp, MixtureShape
from workers.model.experts.router_rule import RouterRule
from workers.model.ignored_keys import ignored_keys
from workers.model.model_config import read_model_config
from workers.model.sizes import ModelWork


class Published(NamedTuple):
    """The keys of a config.json that shape its model, as its makers published them, and its experts."""

    config: dict[str, Any]
    mixture: MixtureShape
    # All weights of the model, and those that a token is multiplied by, in billions, as its makers say.
    all_billions: float
    used_billions: float


MODELS = {
    "Qwen/Qwen3-30B-A3B": Published(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        MixtureShape(RouterRule(128, 8, "softmax", is_normalized=True), 768, tuple(range(48))),
        30.5,
        3.3,
    ),
    "mistralai/Mixtral-8x7B-v0.1": Published(
        {
            "architectures": ["MixtralForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mixtral",
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "vocab_size": 32000,
        },
        MixtureShape(RouterRule(8, 2, "softmax", is_normalized=True), 14336, tuple(range(32))),
        46.7,
        12.9,
    ),
    "allenai/OLMoE-1B-7B-0924": Published(
        {
            "architectures": ["OlmoeForCausalLM"],
            "attention_bias": False,
            "clip_qkv": None,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "max_position_embeddings": 4096,
            "model_type": "olmoe",
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": 50304,
        },
        MixtureShape(RouterRule(64, 8, "softmax"), 1024, tuple(range(16))),
        6.9,
        1.3,
    ),
    "zai-org/GLM-4.5-Air": Published(
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "model_type": "glm4_moe",
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "use_qk_norm": False,
            "vocab_size": 151552,
        },
        MixtureShape(
            RouterRule(128, 8, "sigmoid", is_normalized=True, sum_offset=1e-20),
            1408,
            tuple(range(1, 46)),
            1408,
        ),
        106.0,
        12.0,
    ),
    "openai/gpt-oss-20b": Published(
        {
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "model_type": "gpt_oss",
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "quantization_config": {"quant_method": "mxfp4"},
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "vocab_size": 201088,
        },
        MixtureShape(RouterRule(32, 4, "softmax_chosen"), 2880, tuple(range(24)), clamp=Clamp()),
        20.9,
        3.6,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_published_experts_are_read(name: str, tmp_path: Path) -> None:
    wanted = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(wanted.config), encoding="utf-8")
    config = read_model_config(tmp_path)
    assert ignored_keys(tmp_path) == {}
    assert config.mixture == wanted.mixture


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_weights_as_its_makers_say(name: str, tmp_path: Path) -> None:
    """To 3 %: names of models round their numbers."""
    wanted = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(wanted.config), encoding="utf-8")
    config = read_model_config(tmp_path)
    work, head = ModelWork(config, 1), config.vocab_size * config.hidden_size
    assert (work.weight_bytes + head) / 1e9 == pytest.approx(wanted.all_billions, rel=0.03)
    used = work.of([(0, 1)], 1).flops / 2
    assert used / 1e9 == pytest.approx(wanted.used_billions, rel=0.1)
