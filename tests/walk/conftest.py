"""Fixtures of the walk: one random-weight model, and a house of real brains and ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from walk_house import House

from workers.model.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("walk-model")
    write_random_checkpoint(path, "llama", seed=3)
    return path


@pytest.fixture
async def house(model_dir: Path) -> AsyncIterator[House]:
    built = House(model_dir)
    yield built
    built.wake_all()
    await built.close()
