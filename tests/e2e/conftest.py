"""Fixtures of the walk: one random-weight model, houses of real engine cores and ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from e2e_harness import SINGLE, E2eHarness

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.config import Parallel


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("walk-model")
    write_random_checkpoint(path, "llama", seed=3)
    return path


@pytest.fixture
def shape(request: pytest.FixtureRequest) -> Parallel:
    """Of the replicas of `harness`; one rank unless the test is parametrized by it."""
    given = getattr(request, "param", SINGLE)
    assert isinstance(given, Parallel)
    return given


@pytest.fixture
async def harness(model_dir: Path, shape: Parallel) -> AsyncIterator[E2eHarness]:
    """An empty harness for a test that breaks things."""
    async with E2eHarness(model_dir, shape) as built:
        yield built


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_harness(model_dir: Path) -> AsyncIterator[E2eHarness]:
    """Replicas p0 (prefill), d0 (decode), b0 (both) for the tests of a module that leave them whole."""
    async with E2eHarness(model_dir) as built:
        await built.add("p0", "prefill")
        await built.add("d0", "decode")
        await built.add("b0", "both")
        yield built
