"""The keys of published config.json files of hybrid models: what is made of them, and that none is ignored
unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from workers.model.ignored_keys import ignored_keys
from workers.model.kv_groups import kv_groups
from workers.model.model_config import read_model_config


class PublishedHybrid(NamedTuple):
    """A config.json as its makers published it, but for keys about training and tokens; and what follows:
    the layers that attend and how many keep a state, the size of a feed-forward, and the bytes of all states
    of a sequence."""

    config: dict[str, Any]
    num_context: int
    attending: list[int]
    num_states: int
    intermediate_size: int
    state_bytes: int


LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
MODELS = {
    "LiquidAI/LFM2-1.2B": PublishedHybrid(LFM2, 128000, [2, 5, 8, 10, 12, 14], 10, 8192, 10 * 2 * 2048 * 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_published_keys_describe_the_states(name: str, tmp_path: Path) -> None:
    wanted = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(wanted.config), encoding="utf-8")
    config = read_model_config(tmp_path)
    assert ignored_keys(tmp_path) == {}
    assert config.max_context_tokens == wanted.num_context
    full, states = kv_groups(config)
    assert list(full.layers) == wanted.attending
    assert len(states.layers) == wanted.num_states
    assert config.intermediate_size == wanted.intermediate_size
    assert len(states.layers) * config.num_kv_heads * states.state_size * 4 == wanted.state_bytes
