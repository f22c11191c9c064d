"""List shapes of published models by name, so that you can plan for one without its files. The keys are those
of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from workers.model.quantization.stored_format import MXFP4, StoredFormat


class PublishedShape(NamedTuple):
    """A published model: its config.json, where it is on the hub, and the format in which its experts are
    stored, if that is one of their own."""

    hub_name: str
    config: Mapping[str, Any]
    experts: StoredFormat | None = None


def _dense(family: str, architecture: str, sizes: tuple[int, int, int, int, int, int], **others: Any) -> Any:
    """Return the keys of a model with these sizes: vocabulary, hidden states, feed-forward, layers, heads,
    key-value heads."""
    vocab, hidden, inner, layers, heads, kv_heads = sizes
    return {
        "model_type": family,
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        **others,
    }


def _qwen3(*sizes: int, **others: Any) -> Any:
    vocab, hidden, inner, layers, heads, kv_heads = sizes
    known = (vocab, hidden, inner, layers, heads, kv_heads)
    others = {"head_dim": 128, "max_position_embeddings": 40960, **others}
    return _dense("qwen3", "Qwen3ForCausalLM", known, **others)


_GPT_OSS: Any = {
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def _gpt_oss(num_layers: int, num_experts: int) -> Any:
    kinds = ["sliding_attention", "full_attention"] * (num_layers // 2)
    sizes = (201088, 2880, 2880, num_layers, 64, 8)
    others = {**_GPT_OSS, "num_local_experts": num_experts, "layer_types": kinds}
    return _dense("gpt_oss", "GptOssForCausalLM", sizes, **others)


_LLAMA_ROPE: Any = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama3(hidden: int, inner: int, layers: int, heads: int) -> Any:
    sizes = (128256, hidden, inner, layers, heads, 8)
    others = {"rope_theta": 5e5, "rope_scaling": _LLAMA_ROPE, "rms_norm_eps": 1e-5}
    return _dense("llama", "LlamaForCausalLM", sizes, **others)


_QWEN3_30B: Any = {
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_MIXTRAL: Any = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
_DEEPSEEK_V3: Any = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
_SHAPES = (
    PublishedShape("meta-llama/Llama-3.1-8B-Instruct", _llama3(4096, 14336, 32, 32)),
    PublishedShape("meta-llama/Llama-3.3-70B-Instruct", _llama3(8192, 28672, 80, 64)),
    PublishedShape("Qwen/Qwen3-0.6B", _qwen3(151936, 1024, 3072, 28, 16, 8, tie_word_embeddings=True)),
    PublishedShape("Qwen/Qwen3-8B", _qwen3(151936, 4096, 12288, 36, 32, 8)),
    PublishedShape("Qwen/Qwen3-32B", _qwen3(151936, 5120, 25600, 64, 64, 8)),
    PublishedShape(
        "Qwen/Qwen3-30B-A3B",
        _dense("qwen3_moe", "Qwen3MoeForCausalLM", (151936, 2048, 6144, 48, 32, 4), **_QWEN3_30B),
    ),
    PublishedShape("openai/gpt-oss-20b", _gpt_oss(24, 32), MXFP4),
    PublishedShape("openai/gpt-oss-120b", _gpt_oss(36, 128), MXFP4),
    PublishedShape(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        _dense("mixtral", "MixtralForCausalLM", (32000, 4096, 14336, 32, 32, 8), **_MIXTRAL),
    ),
    PublishedShape(
        "deepseek-ai/DeepSeek-V3",
        _dense("deepseek_v3", "DeepseekV3ForCausalLM", (129280, 7168, 18432, 61, 128, 128), **_DEEPSEEK_V3),
    ),
)


def _short(hub_name: str) -> str:
    return hub_name.partition("/")[2].lower().removesuffix("-v0.1").removesuffix("-instruct")


# By the last part of the hub's name, in lower case, without `-instruct`.
NAME_TO_SHAPE: Mapping[str, PublishedShape] = MappingProxyType({_short(it.hub_name): it for it in _SHAPES})


def published_shape(name: str) -> PublishedShape | None:
    """Return the shape of this name, which may be the hub's; None where it is not listed."""
    return NAME_TO_SHAPE.get(_short(name) if "/" in name else _short(f"/{name}"))
