"""Requests whose context is longer than the device's memory, over real engine cores and ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from e2e_harness import E2eHarness

from workers.config import Parallel

pytestmark = pytest.mark.slow

NUM_DEVICE_TOKENS = 256
ENGINE = {"kv_tokens": NUM_DEVICE_TOKENS, "offload_tokens": 1024}


def prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 190) for _ in range(num_tokens)]


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2)], ids=["1x1", "2x1"])
async def test_a_context_of_four_times_the_device_has_the_same_tokens(
    harness: E2eHarness, parallel: Parallel
) -> None:
    unbounded = await harness.add("unbounded")
    small = await harness.add("small", engine=ENGINE, parallel=parallel)
    tokens = prompt(1, 4 * NUM_DEVICE_TOKENS - 120)
    sampling: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 5}
    wanted = await harness.run(unbounded, harness.submission("w", tokens, **sampling))
    heard = await harness.run(small, harness.submission("r", tokens, **sampling))
    assert heard.failure is None
    assert heard.sequence() == wanted.sequence()
    assert small.core.scheduler.life.num_preemptions == 0
    await harness.quiet()


async def test_without_host_memory_such_a_request_is_refused_by_name(harness: E2eHarness) -> None:
    small = await harness.add("small", engine={"kv_tokens": NUM_DEVICE_TOKENS})
    heard = await harness.run(small, harness.submission("r", prompt(1, 4 * NUM_DEVICE_TOKENS)))
    assert heard.failure is not None
    assert heard.failure.code == "invalid"
    assert "prompt" in heard.failure.reason
