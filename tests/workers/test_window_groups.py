"""Layers with a window whose KV is apart, with real models: the tokens are those of one KV for all layers,
and what is behind a window is never read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from local_engine import BLOCK, GREEDY, SEEDED, LocalEngine, draw, packed, submitted
from slow_cases import slow_but

from workers.config import EngineConfig
from workers.messages.link import Submission
from workers.messages.sampling import SamplingParams
from workers.model.kv_groups import GroupBytes, GroupLimit, WindowCapacity, kv_groups
from workers.model.model_config import read_model_config
from workers.rank.device_queue import CpuQueue, DeviceQueue
from workers.scheduler.step import StepOutcome

MakeCheckpoint = Callable[..., Path]
CONFIG = EngineConfig(block_tokens=16, max_batch_tokens=96, chunk_tokens=64, max_sequences=4)
WINDOW = 40
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "family": "gemma3_text",
        "num_hidden_layers": 5,
        "sliding_window": WINDOW,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
    },
    # Heads of two kinds; two layers attend to the KV of the two before them.
    "gemma4": {
        "family": "gemma4_text",
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 300,
        "tie_word_embeddings": True,
    },
    "qwen2": {
        "family": "qwen2",
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
}
NO_GROUPS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral", "sliding_window": WINDOW},
}


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class PoisonedEngine(LocalEngine):
    """An engine in which every free block of a group with a window holds NaN."""

    most_used = 0

    def step(self) -> StepOutcome | None:
        outcome = super().step()
        for number, pool in enumerate(self.group_pools):
            self.most_used = max(self.most_used, pool.num_total - pool.num_free)
            for runner in self.runners:
                kv = runner.window_kvs[number]
                kv[pool._free] = -1 if kv.dtype == torch.int8 else float("nan")  # a scale of NaN
        return outcome


def ask(
    name: str,
    num_prompt_tokens: int,
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    num_shared: int = 0,
    n: int = 1,
) -> Submission:
    """`num_shared` tokens of the prompt are those of every other."""
    prompt = packed(draw(num_shared, seed=1)) + packed(draw(num_prompt_tokens, seed=sum(name.encode())))
    return submitted(
        name,
        prompt,
        SamplingParams(temperature=sampling.temperature, max_tokens=max_tokens, ignore_eos=True),
        n=n,
    )


# More than are served at a time; longer than the window, and shorter; several samples of a prompt.
REQUESTS = (
    ask("long", 300, 40),
    ask("grows", 5, 150, SEEDED),
    ask("two", 100, 30, SEEDED, n=2),
    ask("shared a", 30, 20, num_shared=160),
    ask("shared b", 50, 20, SEEDED, num_shared=160),
)
LATER = (
    ask("shared c", 41, 20, num_shared=160),
    ask("shared d", 20, 10, num_shared=130),
    ask("long", 300, 50),
)


def run(
    model_dir: Path,
    num_layers: int,
    *,
    has_windows: bool,
    num_blocks: int = 100,
    tp: int = 1,
    pp: int = 1,
    queue: DeviceQueue | None = None,
    kv_dtype: Literal["auto", "int8"] = "auto",
) -> dict[tuple[str, int], bytes]:
    """Return the outputs of all requests; later ones find what earlier ones have left."""
    stages: Sequence[tuple[int, int]] = [(0, num_layers)]
    if pp == 2:
        stages = [(0, 2), (2, num_layers)]
    config = CONFIG.model_copy(update={"kv_dtype": kv_dtype})
    engine = PoisonedEngine(
        model_dir, config, num_blocks, tp=tp, stages=stages, has_windows=has_windows, queue=queue
    )
    assert bool(engine.group_pools) == has_windows
    outputs = engine.run(REQUESTS) | {
        (f"later {key[0]}", key[1]): it for key, it in engine.run(LATER).items()
    }
    for pool in engine.group_pools:
        of_sequence = -(-WINDOW // BLOCK) + 2
        assert pool.num_total < num_blocks
        assert (
            engine.most_used <= CONFIG.max_sequences * of_sequence + pp * CONFIG.max_batch_tokens // BLOCK + 6
        )
    engine.close()
    return outputs


# Layers of Gemma 4 that share KV are of one stage, and its one key-value head is not split.
SPLITS = [
    *((family, 1, 1) for family in FAMILIES),
    *((family, tp, pp) for family in ("gemma3", "qwen2") for tp, pp in ((2, 1), (1, 2))),
]


@pytest.mark.parametrize("split", slow_but(SPLITS, ("gemma4", 1, 1)))
def test_the_tokens_are_those_of_one_kv_for_all_layers(
    make_checkpoint: MakeCheckpoint, backend: str, split: tuple[str, int, int]
) -> None:
    family, tp, pp = split
    options = FAMILIES[family]
    model_dir, num_layers = make_checkpoint(**options), options["num_hidden_layers"]
    expected = run(model_dir, num_layers, has_windows=False, tp=tp, pp=pp)
    assert run(model_dir, num_layers, has_windows=True, tp=tp, pp=pp) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_of_windows_are_on_the_device_too(make_checkpoint: MakeCheckpoint, family: str) -> None:
    """Where tokens and tables stay there between steps."""
    options = FAMILIES[family]
    model_dir, num_layers = make_checkpoint(**options), options["num_hidden_layers"]
    expected = run(model_dir, num_layers, has_windows=False)
    assert run(model_dir, num_layers, has_windows=True, queue=CpuQueue()) == expected


def test_windows_are_freed_in_8_bits_too(make_checkpoint: MakeCheckpoint, backend: str) -> None:
    options = FAMILIES["gemma3"]
    model_dir, num_layers = make_checkpoint(**options), options["num_hidden_layers"]
    expected = run(model_dir, num_layers, has_windows=False, kv_dtype="int8")
    assert run(model_dir, num_layers, has_windows=True, kv_dtype="int8") == expected


def test_groups_are_the_layers_of_each_window(make_checkpoint: MakeCheckpoint) -> None:
    groups = kv_groups(read_model_config(make_checkpoint(**FAMILIES["gemma3"])))
    assert [(group.layers, group.window) for group in groups] == [((2, 4), 0), ((0, 1, 3), WINDOW)]
    shared = kv_groups(read_model_config(make_checkpoint(**FAMILIES["gemma4"])))
    assert [(group.layers, group.window) for group in shared] == [((1,), 0), ((0,), WINDOW)]


@pytest.mark.parametrize("family", NO_GROUPS)
def test_layers_that_are_alike_are_no_groups(make_checkpoint: MakeCheckpoint, family: str) -> None:
    assert kv_groups(read_model_config(make_checkpoint(**NO_GROUPS[family]))) == ()


def test_a_window_has_blocks_for_its_sequences_and_for_chunks() -> None:
    capacity = WindowCapacity(block_tokens=16, max_sequences=4, max_batch_tokens=96, num_stages=2)
    assert capacity.most_blocks(40) == 6 * (3 + 2) + 2 * 6


@pytest.mark.parametrize("num_bytes", [0, 99, 100, 1000, 1001, 5000])
def test_as_many_blocks_fit_as_bytes_are_there_for(num_bytes: int) -> None:
    sizes = GroupBytes([40, 60, 0], [GroupLimit(10), GroupLimit(5)])
    fitting = sizes.fitting_blocks(num_bytes)
    assert sizes.bytes_of(fitting) <= num_bytes < sizes.bytes_of(fitting + 1)
    assert sizes.bytes_of(fitting) + sizes.saved_bytes(fitting) == fitting * 100
