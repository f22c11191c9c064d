"""The keys of published config.json files: what is made of them, and that none is ignored unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from workers.model.families.known_families import NAME_TO_FAMILY
from workers.model.ignored_keys import ignored_keys
from workers.model.model_config import read_model_config

_EVERY_FOURTH = [int((layer + 1) % 4 != 0) for layer in range(36)]


class Published(NamedTuple):
    """A config.json as its makers published it, but for keys about training and tokens; and what follows:
    the context length, the layers with a window, and those without rotary embedding."""

    config: dict[str, Any]
    num_context: int
    windows: dict[int, int] = {}
    num_unrotated: int = 0
    # Layers, cells and width of the KV, where layers have heads of several sizes.
    kv_cells: tuple[int, int, int, int] | None = None


def _gemma4(layer_types: list[str], **keys: Any) -> dict[str, Any]:
    """Return a configuration of Gemma 4 with images, of which its text model is read."""
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "layer_types": layer_types,
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": len(layer_types),
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "model_type": "gemma4",
        "text_config": text | keys,
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision"},
    }


MODELS: dict[str, Published] = {
    "google/gemma-2-2b": Published(
        {
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "initializer_range": 0.02,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "model_type": "gemma2",
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": 256000,
        },
        8192,
        {4096: 13, 0: 13},
    ),
    "google/gemma-3-1b-it": Published(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "initializer_range": 0.02,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 262144,
        },
        32768,
        {512: 22, 0: 4},
    ),
    "gemma-3-1b-it, as transformers 5 writes it": Published(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "layer_types": [
                "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(26)
            ],
            "rope_parameters": {
                "full_attention": {"rope_theta": 1000000, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 10000, "rope_type": "default"},
            },
            "sliding_window": 512,
            "vocab_size": 262144,
        },
        32768,
        {512: 22, 0: 4},
    ),
    "google/gemma-4-E2B-it": Published(
        _gemma4(
            [*["sliding_attention"] * 4, "full_attention"] * 7,
            hidden_size=1536,
            hidden_size_per_layer_input=256,
            intermediate_size=6144,
            num_attention_heads=8,
            num_key_value_heads=1,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
        ),
        131072,
        {512: 28, 0: 7},
        kv_cells=(15, 1, 512, 2),
    ),
    "google/gemma-4-E4B-it": Published(
        _gemma4(
            [*["sliding_attention"] * 5, "full_attention"] * 7,
            hidden_size=2560,
            hidden_size_per_layer_input=256,
            intermediate_size=10240,
            num_attention_heads=8,
            num_key_value_heads=2,
            num_kv_shared_layers=18,
        ),
        131072,
        {512: 35, 0: 7},
        kv_cells=(24, 2, 512, 2),
    ),
    "google/gemma-4-31B-it": Published(
        _gemma4(
            [*["sliding_attention"] * 5, "full_attention"] * 10,
            attention_k_eq_v=True,
            hidden_size=5376,
            hidden_size_per_layer_input=0,
            intermediate_size=21504,
            max_position_embeddings=262144,
            num_attention_heads=32,
            num_global_key_value_heads=4,
            num_key_value_heads=16,
            sliding_window=1024,
        ),
        262144,
        {1024: 50, 0: 10},
        kv_cells=(60, 4, 1024, 2),
    ),
    "HuggingFaceTB/SmolLM3-3B": Published(
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": 128012,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "mlp_bias": False,
            "model_type": "smollm3",
            "no_rope_layer_interval": 4,
            "no_rope_layers": _EVERY_FOURTH,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "pad_token_id": 128004,
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "use_cache": False,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
        65536,
        {0: 36},
        num_unrotated=9,
    ),
    "allenai/OLMo-2-0425-1B": Published(
        {
            "architectures": ["Olmo2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eos_token_id": 100257,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "model_type": "olmo2",
            "num_attention_heads": 16,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "pad_token_id": 100277,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "use_cache": False,
            "vocab_size": 100352,
        },
        4096,
        {0: 16},
    ),
    "allenai/Olmo-3-7B-Instruct": Published(
        {
            "architectures": ["Olmo3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eos_token_id": 100257,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "layer_types": [
                "full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(32)
            ],
            "max_position_embeddings": 65536,
            "model_type": "olmo3",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 100278,
        },
        65536,
        {4096: 24, 0: 8},
    ),
    "zai-org/GLM-4-9B-0414": Published(
        {
            "architectures": ["Glm4ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338],
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 13696,
            "max_position_embeddings": 32768,
            "model_type": "glm4",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "pad_token_id": 151329,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 151552,
        },
        32768,
        {0: 40},
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": Published(
        {
            "architectures": ["Exaone4ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 361,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 4096,
            "layer_types": ["full_attention"] * 30,
            "max_position_embeddings": 65536,
            "model_type": "exaone4",
            "num_attention_heads": 32,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 1000000,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 102400,
        },
        65536,
        {0: 30},
    ),
    "LGAI-EXAONE/EXAONE-4.0-32B": Published(
        {
            "architectures": ["Exaone4ForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 27392,
            "max_position_embeddings": 131072,
            "model_type": "exaone4",
            "num_attention_heads": 40,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 1000000,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False,
            "vocab_size": 102400,
        },
        131072,
        {4096: 48, 0: 16},
        num_unrotated=16,
    ),
    "swiss-ai/Apertus-8B-Instruct-2509": Published(
        {
            "architectures": ["ApertusForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 68,
            "hidden_act": "xielu",
            "hidden_dropout": 0.0,
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 21504,
            "max_position_embeddings": 65536,
            "mlp_bias": False,
            "model_type": "apertus",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pad_token_id": 3,
            "post_norm": False,
            "qk_norm": True,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
                "type": "llama3",
            },
            "rope_theta": 12000000,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 131072,
        },
        65536,
        {0: 32},
    ),
    "microsoft/Phi-4-mini-instruct": Published(
        {
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 199999,
            "embd_pdrop": 0.0,
            "eos_token_id": 199999,
            "full_attn_mod": 1,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "phi3",
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 199999,
            "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 200064,
        },
        131072,
        {262144: 32},
    ),
    "CohereForAI/c4ai-command-r-v01": Published(
        {
            "architectures": ["CohereForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 5,
            "eos_token_id": 255001,
            "hidden_act": "silu",
            "hidden_size": 8192,
            "initializer_range": 0.02,
            "intermediate_size": 22528,
            "layer_norm_eps": 1e-05,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "model_max_length": 131072,
            "model_type": "cohere",
            "num_attention_heads": 64,
            "num_hidden_layers": 40,
            "num_key_value_heads": 64,
            "pad_token_id": 0,
            "pretraining_tp": 1,
            "rope_theta": 8000000.0,
            "torch_dtype": "float16",
            "use_cache": True,
            "vocab_size": 256000,
        },
        131072,
        {0: 40},
    ),
}


def _write(folder: Path, **keys: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_no_published_key_is_ignored(name: str, tmp_path: Path) -> None:
    wanted = MODELS[name]
    config = read_model_config(_write(tmp_path, **wanted.config))
    assert ignored_keys(tmp_path) == {}
    assert config.family == wanted.config.get("text_config", wanted.config)["model_type"]
    cells = config.kv_cells
    sizes = cells.num_layers, cells.num_cells, cells.width, cells.num_kinds
    assert wanted.kv_cells in (None, sizes)
    assert config.max_context_tokens == wanted.num_context
    windows = list(config.sliding_windows)
    assert {window: windows.count(window) for window in windows} == wanted.windows
    assert config.ropes.count(None) == wanted.num_unrotated


@pytest.mark.parametrize(("longer", "wanted"), [(16384, 16384), (4096, 8192), (None, 8192)])
def test_the_larger_length_is_served_where_a_family_names_two(
    longer: int | None, wanted: int, tmp_path: Path
) -> None:
    published = MODELS["CohereForAI/c4ai-command-r-v01"].config
    _write(tmp_path, **{**published, "model_max_length": longer})
    assert read_model_config(tmp_path).max_context_tokens == wanted
    _write(tmp_path, **{**published, "architectures": ["Cohere2ForCausalLM"], "model_max_length": longer})
    assert read_model_config(tmp_path).max_context_tokens == 8192


# Keys that some families are computed by, and a value with which each changes the result.
USED_BY: dict[str, tuple[Any, set[str]]] = {
    "attn_logit_softcapping": (50.0, {"gemma2", "gemma3_text"}),
    "final_logit_softcapping": (30.0, {"gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text"}),
    "query_pre_attn_scalar": (168, {"gemma2", "gemma3_text"}),
    "rope_local_base_freq": (20000.0, {"gemma3_text"}),
    "no_rope_layers": ([1, 0], {"smollm3"}),
    "no_rope_layer_interval": (2, {"smollm3"}),
    "use_qk_norm": (
        True,
        {
            *("qwen3", "gemma3_text", "gemma4_text", "gemma4_unified_text", "olmo2", "olmo3", "exaone4"),
            *("apertus", "cohere", "qwen3_moe", "olmoe", "minimax_m2", "glm4_moe"),
        },
    ),
    "embedding_multiplier": (12.0, {"granite", "granitemoe"}),
    "residual_multiplier": (0.2, {"granite", "granitemoe"}),
    "attention_multiplier": (0.1, {"granite", "granitemoe"}),
    "logits_scaling": (8.0, {"granite", "granitemoe"}),
    "logit_scale": (0.5, {"cohere", "cohere2"}),
}


# The keys of hybrid models are those of `test_published_hybrids.py`.
@pytest.mark.parametrize("family", [name for name, it in NAME_TO_FAMILY.items() if it.state is None])
def test_a_key_is_ignored_by_the_families_that_are_not_computed_by_it(family: str, tmp_path: Path) -> None:
    keys = {key: value for key, (value, _) in USED_BY.items()}
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    _write(tmp_path, model_type=family, num_experts_per_tok=2, **shape, **heads, **keys)
    read_model_config(tmp_path)
    assert set(ignored_keys(tmp_path)) == {key for key, (_, users) in USED_BY.items() if family not in users}


def test_factors_of_longrope_are_ignored_by_other_types(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    scaling = {"rope_type": "linear", "factor": 2.0, "long_factor": [1.0] * 8}
    _write(tmp_path, model_type="llama", num_attention_heads=4, rope_scaling=scaling, **shape)
    read_model_config(tmp_path)
    assert set(ignored_keys(tmp_path)) == {"rope_scaling.long_factor"}


def test_in_sets_for_each_kind_of_layers_the_set_is_named(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    _write(tmp_path, model_type="gemma3_text", rope_parameters=parameters, **shape)
    read_model_config(tmp_path)
    assert set(ignored_keys(tmp_path)) == {"rope_parameters.full_attention.mrope_section"}
