"""Checkpoints of random weights, shared by every test of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest
from optional_programs import needs_compiler


class MakeCheckpoint(Protocol):
    """`write_random_checkpoint` into a folder of its own, written once a session for equal arguments."""

    def __call__(self, family: str, *, seed: int = 0, **options: Any) -> Path: ...


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    # Torch is imported here and not above: most tests of this package do without it.
    import torch

    from benchmarks.random_checkpoint import write_random_checkpoint

    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    def make(family: Any, *, seed: int = 0, **options: Any) -> Path:
        key = repr((family, seed, sorted(options.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            write_random_checkpoint(made[key], family, seed=seed, **options)
        return made[key]

    return make


@pytest.fixture(params=[pytest.param("kernels", marks=needs_compiler), "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute on a CPU: compiled kernels, and the torch code of a machine without a compiler."""
    from workers.model import native

    if request.param == "torch":
        monkeypatch.setattr(native, "serves", lambda device, dtype: False)
    else:
        assert native.load() is not None, "there is a C++ compiler, but the kernels could not be built"
    return str(request.param)
