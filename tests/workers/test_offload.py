"""Context beyond device memory, with real models: the tokens are those of an engine that holds all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from local_engine import BLOCK, GREEDY, SEEDED, LocalEngine, draw, packed, submitted

from kvtransfer.config import KvDtype
from workers.config import EngineConfig
from workers.messages.link import Submission
from workers.messages.sampling import SamplingParams
from workers.model.host_kv import MODES, OffloadMode

pytestmark = pytest.mark.slow

MakeCheckpoint = Callable[..., Path]
NUM_DEVICE_BLOCKS = 8
NUM_HOST_BLOCKS = 60
CONFIG = EngineConfig(block_tokens=16, max_batch_tokens=96, chunk_tokens=64, max_sequences=8)
# Two layers attend to the KV of the two before them.
GEMMA_4: dict[str, Any] = {
    "family": "gemma4_text",
    "num_hidden_layers": 4,
    "sliding_window": 50,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 300,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4": GEMMA_4,
    "llama": {"family": "llama"},
    "qwen3": {"family": "qwen3"},
    "windows": {
        "family": "qwen2",
        "num_hidden_layers": 3,
        "sliding_window": 50,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
}


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def ask(
    name: str,
    num_prompt_tokens: int,
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    priority: int = 0,
    n: int = 1,
) -> Submission:
    prompt = packed(draw(num_prompt_tokens, seed=sum(name.encode())))
    return submitted(
        name,
        prompt,
        SamplingParams(
            temperature=sampling.temperature,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=max_tokens,
            ignore_eos=True,
        ),
        n=n,
        priority=priority,
    )


# One prompt of four times the device's memory, one output beyond it, and others beside them.
BEYOND = (
    ask("long", 4 * NUM_DEVICE_BLOCKS * BLOCK - 50, 80),
    ask("grows", 20, 200, SEEDED),
    ask("urgent", 150, 30, SEEDED, priority=2),
    ask("two", 100, 30, SEEDED, n=2),
)


def run(
    model_dir: Path,
    submissions: Sequence[Submission],
    mode: OffloadMode | None,
    *,
    num_layers: int = 2,
    tp: int = 1,
    pp: int = 1,
    kv_dtype: KvDtype = "auto",
) -> dict[tuple[str, int], bytes]:
    """With the small device and blocks in host memory, or (None) with a device that holds all."""
    stages = [(0, num_layers)] if pp == 1 else [(0, 1), (1, num_layers)]
    sizes = (100, 0) if mode is None else (NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS)
    config = CONFIG.model_copy(update={"kv_dtype": kv_dtype})
    engine = LocalEngine(model_dir, config, *sizes, mode or "in_place", tp=tp, stages=stages)
    outputs = engine.run(submissions)
    if mode is not None:
        assert engine.most_offloaded >= 3 * NUM_DEVICE_BLOCKS
        assert {runner.ready_fields.num_offload_blocks for runner in engine.runners} == {60}
    engine.close()
    return outputs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_an_engine_with_capacity(
    make_checkpoint: MakeCheckpoint, backend: str, family: str, mode: OffloadMode
) -> None:
    options = FAMILIES[family]
    model_dir = make_checkpoint(**options)
    num_layers = options.get("num_hidden_layers", 2)
    expected = run(model_dir, BEYOND, None, num_layers=num_layers)
    assert {name: len(tokens) // 4 for name, tokens in expected.items()} == {
        ("long", 0): 80,
        ("grows", 0): 200,
        ("urgent", 0): 30,
        ("two", 0): 30,
        ("two", 1): 30,
    }
    assert run(model_dir, BEYOND, mode, num_layers=num_layers) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kv_of_8_bits_has_the_tokens_of_an_engine_with_capacity(
    make_checkpoint: MakeCheckpoint, backend: str, kv_dtype: KvDtype, mode: OffloadMode
) -> None:
    model_dir = make_checkpoint("llama")
    expected = run(model_dir, BEYOND, None, kv_dtype=kv_dtype)
    assert run(model_dir, BEYOND, mode, kv_dtype=kv_dtype) == expected
    assert run(model_dir, BEYOND, None) != expected, "it is kept in 8 bits"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_together_have_the_same_tokens(
    make_checkpoint: MakeCheckpoint, tp: int, pp: int, mode: OffloadMode
) -> None:
    model_dir = make_checkpoint("llama")
    expected = run(model_dir, BEYOND, None)
    assert run(model_dir, BEYOND, mode, tp=tp, pp=pp) == expected
