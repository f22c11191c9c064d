"""The kernels of layers, deterministic products and sampling as the compiler makes them for Hopper, which
needs no device."""

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
    script = Path(__file__).parent / "compile_layer_kernels.py"
    for kernel in compile_by_script(script, tmp_path_factory.mktemp("triton")):
        named[kernel["name"]].append(kernel)
    return named


def test_every_kernel_compiles_and_spills_no_register(kernels: Named) -> None:
    assert {name: len(made) for name, made in kernels.items()} == {
        "_rms_norm_kernel": 6,
        "_gate_mul_kernel": 2,
        "_rotate_and_write_kernel": 5,
        "_multiply_kernel": 3,
        "_pieces_kernel": 1,
        "_rows_kernel": 1,
    }
    assert [it for made in kernels.values() for it in made if it["stack_bytes"]] == []


def test_products_use_warpgroups_and_copies_ahead(kernels: Named) -> None:
    for kernel in kernels["_multiply_kernel"]:
        assert kernel["num_group_products"] > 0
        assert kernel["num_copies"] > 0
        assert kernel["programs"] >= 3


def test_many_pieces_of_logits_share_a_multiprocessor(kernels: Named) -> None:
    """They wait for memory, and for each other while they sort."""
    (kernel,) = kernels["_pieces_kernel"]
    assert kernel["programs"] >= 6
