"""Replicas of several ranks: the same tokens as of one rank, alone and handed over between any two shapes."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e_harness import E2eHarness

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.config import Parallel

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHAPES = {
    "1x1": Parallel(),
    "2x1": Parallel(tp=2),
    "1x2": Parallel(pp=2, devices=("cpu", "cpu"), layers=(1, 2)),
    "2x2": Parallel(tp=2, pp=2, devices=("cpu", "cpu")),
    "4x1": Parallel(tp=4),
}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 21},
]
# Both ways between a split of heads and a split of layers, and to and from one rank.
FAST_PAIRS = [("2x1", "1x2"), ("1x2", "2x1"), ("2x1", "1x1"), ("1x1", "1x2")]


def prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 250) for _ in range(num_tokens)]


async def build(model_dir: Path, family: str, shapes: list[str]) -> E2eHarness:
    """One replica of each shape; 4 ranks of 4x1 share 2 key-value heads, and 3 layers do not halve."""
    write_random_checkpoint(model_dir, family, seed=5, num_hidden_layers=3)
    harness = E2eHarness(model_dir)
    async with AsyncExitStack() as ends:
        await ends.enter_async_context(harness)
        for shape in shapes:
            await harness.add(shape, parallel=SHAPES[shape])
        ends.pop_all()
    return harness


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[E2eHarness]:
    built = await build(tmp_path_factory.mktemp("shapes"), "llama", ["1x1", "2x1", "1x2"])
    yield built
    built.wake_all()
    await built.close()


async def check_pair(
    harness: E2eHarness, source: str, target: str, sampling: dict[str, Any], num_tokens: int
) -> None:
    name = f"{source}-{target}-{len(sampling)}"
    tokens = prompt(len(harness.heard), 100)
    alone = harness.submission(f"{name}-alone", tokens, max_tokens=num_tokens, **sampling)
    expected = await harness.run(harness.replicas["1x1"], alone)
    decode = harness.replicas[target] if target != source else None
    split = harness.submission(f"{name}-split", tokens, decode=decode, max_tokens=num_tokens, **sampling)
    heard = await harness.run(harness.replicas[source], split)
    assert heard.failure is None
    assert heard.sequence() == expected.sequence()
    assert len(heard.sequence()) == num_tokens
    if decode is not None:
        assert heard.hand_over is not None
        assert heard.hand_over.num_bad_pieces == 0
        assert heard.hand_over.num_moved_bytes > 0
    await harness.quiet()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize(("source", "target"), FAST_PAIRS)
async def test_a_hand_over_between_shapes(
    harness: E2eHarness, source: str, target: str, sampling: dict[str, Any]
) -> None:
    await check_pair(harness, source, target, sampling, 24)


@pytest.mark.slow  # 13 ranks
@pytest.mark.parametrize("family", ["llama", "qwen3"])
async def test_every_shape_alone_and_every_pair(tmp_path: Path, family: str) -> None:
    harness = await build(tmp_path / "model", family, list(SHAPES))
    try:
        for source in SHAPES:
            for sampling in SAMPLINGS:
                await check_pair(harness, source, source, sampling, 64)
        for source, target in itertools.permutations(SHAPES, 2):
            await check_pair(harness, source, target, {}, 24)
    finally:
        harness.wake_all()
        await harness.close()
