"""The kernels of layers with a recurrent state as the compiler makes them for Hopper, which needs no
device."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

Named = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Named:
    """Return the kernels of each name."""
    from hopper_compiler import compile_by_script

    named = collections.defaultdict(list)
    for kernel in compile_by_script(
        Path(__file__).parent / "compile_states.py", tmp_path_factory.mktemp("triton")
    ):
        named[kernel["name"]].append(kernel)
    return named


def test_every_kernel_compiles_and_fits_a_multiprocessor(kernels: Named) -> None:
    # With tokens of 16 and of 32 bits; steps in which each sequence has one token have a kernel of their own.
    assert {name: len(made) for name, made in kernels.items()} == {
        "_token_kernel": 4,
        "_inverse_kernel": 2,
        "_chunk_kernel": 2,
        "_norm_kernel": 2,
    }
    assert [it for made in kernels.values() for it in made if it["programs"] < 1] == []


def test_chunks_alone_spill_registers(kernels: Named) -> None:
    assert {name for name, made in kernels.items() for it in made if it["stack_bytes"]} <= {"_chunk_kernel"}
    # Those of 16 bits spill few, and two programs share a multiprocessor.
    best = min(kernels["_chunk_kernel"], key=lambda it: int(it["stack_bytes"]))
    assert best["stack_bytes"] < 1024
    assert best["programs"] >= 2
