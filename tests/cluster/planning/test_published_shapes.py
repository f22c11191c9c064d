"""Shapes by name have as many weights, and as much KV, as the models that were published."""

from __future__ import annotations

import pytest

from cluster.errors import ConfigError
from cluster.planning.planned_model import planned_model
from cluster.planning.published_shapes import NAME_TO_SHAPE

# In billions, as their makers say.
NAME_TO_WEIGHTS = {
    "llama-3.1-8b": 8.03,
    "llama-3.3-70b": 70.6,
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "mixtral-8x7b": 46.7,
    "deepseek-v3": 671.0,
}


@pytest.mark.parametrize("name", NAME_TO_SHAPE)
def test_as_many_weights_as_published(name: str) -> None:
    model = planned_model(name, "bf16", "auto")
    num_weights = model.weights.weight_bytes(model.everything, 2, model.form) / 2
    # Latents are expanded by weights of which some are kept in two orders.
    assert num_weights / 1e9 == pytest.approx(NAME_TO_WEIGHTS[name], rel=0.005)


def kv_bytes(name: str, num_tokens: int, kv_dtype: str = "auto") -> float:
    work = planned_model(name, "auto", kv_dtype).work
    return work.of([(num_tokens - 1, 1)], 1).read_bytes - work.read_weight_bytes(1)


def test_published_sizes_of_kv() -> None:
    assert kv_bytes("llama-3.3-70b", 4096) == pytest.approx(1.342e9, rel=0.001)
    # 512 + 64 numbers of 2 bytes in each of 61 layers.
    assert kv_bytes("deepseek-v3", 1000) == 1000 * 61 * 1152
    # 8 bits, and 4 bytes for each 128 elements.
    assert kv_bytes("llama-3.1-8b", 512, "int8") == 512 * 2 * 32 * 8 * (128 + 4)
    # Every other layer keeps 128 tokens.
    assert kv_bytes("gpt-oss-20b", 8192) == 2 * 8 * 64 * 2 * (12 * 8192 + 12 * 128)


def test_heads_have_a_size_of_their_own() -> None:
    """Not hidden / heads, of which published formulas of KV make half here."""
    shape = planned_model("qwen3-30b-a3b", "auto", "auto").shape
    assert shape.head_dim == 128 == 2 * shape.hidden_size // shape.num_heads
    assert kv_bytes("qwen3-30b-a3b", 1000) == 1000 * 2 * 48 * 4 * 128 * 2


def test_stored_forms() -> None:
    billion = planned_model("deepseek-v3", "auto", "auto").weight_bytes / 1e9
    assert billion == pytest.approx(NAME_TO_WEIGHTS["deepseek-v3"], rel=0.06)
    # Experts have 4 bits, and a scale of 16 bits for 32 weights in memory, of 8 bits in files of 65 GB.
    billion = planned_model("gpt-oss-120b", "auto", "auto").weight_bytes / 1e9
    assert billion == pytest.approx(65.2 + 114.7 / 32, rel=0.01)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen3-8b", "QWEN3-8B"])
def test_names_of_the_hub_and_short_ones(name: str) -> None:
    assert planned_model(name, "auto", "auto").source == "Qwen/Qwen3-8B"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        ConfigError, match=r"--model qwen9-1b: neither a folder.*known by name: llama-3.1-8b, "
    ):
        planned_model("qwen9-1b", "auto", "auto")
