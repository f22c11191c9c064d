"""The kernels of experts with quantized weights as the compiler makes them for Hopper and for Ampere, which
needs no device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

HOPPER, AMPERE = 90, 80
# `compile_quantized_experts.py` compiles two products of each form, for few and for many rows.
NUM_FORMS, NUM_TILES = 2, 2


@pytest.mark.parametrize("capability", [HOPPER, AMPERE], ids=["hopper", "ampere"])
def test_every_kernel_compiles_and_spills_no_register(capability: int, tmp_path: Path) -> None:
    """Codes are copied ahead. Programs of few rows keep so little beside that several share a
    multiprocessor."""
    from hopper_compiler import compile_by_script

    script = Path(__file__).parent / "compile_quantized_experts.py"
    kernels: list[dict[str, Any]] = compile_by_script(script, tmp_path, str(capability))
    assert [it["name"] for it in kernels] == ["_expert_product_kernel"] * (2 * NUM_FORMS * NUM_TILES)
    for kernel in kernels:
        assert kernel["stack_bytes"] == 0
        assert kernel["num_copies"] > 0
        assert kernel["num_group_products" if capability == HOPPER else "num_warp_products"] > 0
    for kernel in kernels[: 2 * NUM_FORMS]:
        assert kernel["programs"] >= 4
        # Rows in 3 stages of 4 KiB, and codes alike.
        assert kernel["shared_bytes"] >= 24 << 10
