"""KV that the store keeps in 8 bits (`store.kv_dtype`): what is found again is the KV that was computed,
rounded once, in any tier, at any shape, and after a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_harness import BLOCK_TOKENS, E2eHarness, Heard, Replica, add_with_store, prompt, stored_blocks
from rounded_kv import continued_behind
from store_harness import StoreHarness

from workers.config import Parallel

PROMPT = prompt(5, 200)
NUM_FULL_BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
NUM_LOADED = NUM_FULL_BLOCKS * BLOCK_TOKENS
NUM_TOKENS = 40
SHAPES = {
    "1x1": Parallel(),
    "2x1": Parallel(tp=2),
    "1x2": Parallel(pp=2, devices=("cpu", "cpu"), layers=(1, 1)),
}
# Of log-probabilities, by the order of sums; rounding changes them by far more.
MOST_ERROR = 2e-4


@pytest.fixture
async def stored(model_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[E2eHarness, StoreHarness]]:
    """An empty harness of replicas, and a store that is not started."""
    harness = E2eHarness(model_dir)
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        yield harness, store


async def run(harness: E2eHarness, at: Replica, name: str, **how: Any) -> Heard:
    sampling = {"max_tokens": NUM_TOKENS, "num_logprobs": 1, **how}
    heard = await harness.run(at, harness.submission(name, PROMPT, **sampling))
    assert heard.failure is None, heard.failure
    return heard


def check(heard: Heard, model_dir: Path, kv_dtype: str | None, num_loaded: int = NUM_LOADED) -> None:
    """Check tokens and log-probabilities against the model over KV that was rounded so."""
    tokens, logprobs = continued_behind(model_dir, PROMPT, num_loaded or NUM_LOADED, kv_dtype, NUM_TOKENS)
    assert heard.sequence() == tokens
    given = torch.tensor([heard.logprobs[index].logprob for index in range(NUM_TOKENS)])
    wanted = logprobs[range(NUM_TOKENS), tokens]
    torch.testing.assert_close(given, wanted, rtol=0, atol=MOST_ERROR)


def loaded(heard: Heard) -> dict[str, int]:
    assert heard.prefill is not None
    return dict(heard.prefill.num_loaded_tokens)


def test_the_reference_sees_the_rounding(model_dir: Path) -> None:
    """Else the tests below would show nothing."""
    exact, int8, fp8 = (
        continued_behind(model_dir, PROMPT, NUM_LOADED, kv_dtype, NUM_TOKENS)[1][0]
        for kv_dtype in (None, "int8", "fp8")
    )
    assert 10 * MOST_ERROR < float((int8 - exact).abs().max()) < float((fp8 - exact).abs().max()) < 1


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
async def test_a_hit_is_kv_that_was_rounded_once(
    stored: tuple[E2eHarness, StoreHarness], model_dir: Path, kv_dtype: str
) -> None:
    harness, store = stored
    await store.start()
    first = await add_with_store(harness, store, "a", store_kv_dtype=kv_dtype)
    check(await run(harness, first, "computed"), model_dir, None)
    await stored_blocks(first, NUM_FULL_BLOCKS)
    second = await add_with_store(harness, store, "b", store_kv_dtype=kv_dtype)
    heard = await run(harness, second, "loaded")
    assert loaded(heard) == {"dram": NUM_LOADED}
    check(heard, model_dir, kv_dtype)
    await harness.quiet()
