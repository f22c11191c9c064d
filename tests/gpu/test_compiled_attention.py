"""The kernels of attention as the compiler makes them for Hopper, which needs no device. The sizes of tiles
in `workers/model/cuda/attention.py` were chosen by what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")


# The kernels of usual heads; those of heads of 512 follow, and those that read KV of 8 bits.
NUM_USUAL, NUM_LARGE, NUM_QUANTIZED = 12, 3, 6


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from hopper_compiler import compile_by_script

    script = Path(__file__).parent / "compile_attention.py"
    return compile_by_script(script, tmp_path_factory.mktemp("triton"))


def test_no_register_is_spilled(kernels: list[dict[str, Any]]) -> None:
    assert len(kernels) == NUM_USUAL + NUM_LARGE + NUM_QUANTIZED
    assert {it["stack_bytes"] for it in kernels} == {0}


def test_large_heads_leave_shared_memory_for_a_program(kernels: list[dict[str, Any]]) -> None:
    """Two stages of a tile of 64 keys and values of 512 would take 256 KiB, where 227 are left."""
    large = kernels[NUM_USUAL : NUM_USUAL + NUM_LARGE]
    assert {it["name"] for it in large} == {it["name"] for it in kernels[:NUM_USUAL]}
    assert max(it["shared_bytes"] for it in large) <= 227 << 10
    assert min(it["num_warp_products"] for it in large if it["name"] != "_reduce_pieces") > 0


def test_chunks_use_warpgroups_and_a_pipeline_of_three_tiles(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels[:NUM_USUAL]:
        if kernel["name"] == "_attend_tiles":
            assert kernel["num_group_products"] > 0
            assert kernel["num_copies"] > 0
            # The queries, and three tiles of keys and values.
            assert kernel["shared_bytes"] >= (128 + 3 * 2 * 64) * 128 * 2
            assert kernel["programs"] == 1


def test_three_programs_of_a_decode_share_a_multiprocessor(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels[:NUM_USUAL]:
        if kernel["name"] == "_attend_pieces":
            assert kernel["num_warp_products"] > 0
            assert kernel["num_copies"] > 0
            # Two tiles of keys and values.
            assert kernel["shared_bytes"] >= 2 * 2 * 64 * 128 * 2
            assert kernel["programs"] == 3


def test_kv_of_8_bits_takes_half_of_a_pipeline(kernels: list[dict[str, Any]]) -> None:
    """It stays in 8 bits in shared memory, and its products are those of tensor cores."""
    for kernel in kernels[NUM_USUAL + NUM_LARGE :]:
        if kernel["name"] == "_attend_tiles":
            assert kernel["num_group_products"] > 0
            assert kernel["shared_bytes"] < (128 + 3 * 2 * 64) * 128 * 2
        if kernel["name"] == "_attend_pieces":
            assert kernel["num_warp_products"] > 0
            assert kernel["programs"] >= 2
