"""The kernels of products with quantized weights as the compiler makes them for Hopper and for Ampere, which
needs no device."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

Named = dict[str, list[dict[str, Any]]]
HOPPER, AMPERE = 90, 80
PRODUCT = "_quantized_product_kernel"
# The forms that `compile_quantized_products.py` compiles, each for few, some and many rows.
NUM_FORMS, NUM_TILES = 5, 3


@pytest.fixture(scope="module", params=[HOPPER, AMPERE], ids=["hopper", "ampere"])
def capability(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


@pytest.fixture(scope="module")
def kernels(capability: int, tmp_path_factory: pytest.TempPathFactory) -> Named:
    """Return the kernels of each name."""
    from hopper_compiler import compile_by_script

    named = collections.defaultdict(list)
    script = Path(__file__).parent / "compile_quantized_products.py"
    for kernel in compile_by_script(script, tmp_path_factory.mktemp("triton"), str(capability)):
        named[kernel["name"]].append(kernel)
    return named


def test_every_kernel_compiles_and_spills_no_register(kernels: Named, capability: int) -> None:
    assert {name: len(made) for name, made in kernels.items()} == {
        PRODUCT: NUM_FORMS * NUM_TILES + 5,
        "_add_segments_kernel": 2 * (NUM_FORMS + 1) + 1,
        "_round_rows_kernel": 2,
        "_look_up_kernel": 1,
    }
    spilling = [it for made in kernels.values() for it in made if it["stack_bytes"]]
    # Many rows with IQ4_NL on Ampere, whose table of codes takes registers.
    assert [it["stack_bytes"] <= 64 for it in spilling] == [True] * (capability == AMPERE)


def test_codes_and_scales_are_copied_ahead_and_decoded_in_registers(kernels: Named, capability: int) -> None:
    """A program of few rows keeps so little beside its copies that several share a multiprocessor."""
    products = kernels[PRODUCT][: NUM_FORMS * NUM_TILES]
    for kernel in products:
        assert kernel["num_group_products" if capability == HOPPER else "num_warp_products"] > 0
        assert kernel["num_copies"] > 0
    for kernel in products[::NUM_TILES]:
        assert kernel["programs"] >= 3
        # Rows in 4 stages of 4 KiB, and at least 2 of codes of 4 KiB.
        assert kernel["shared_bytes"] >= (16 << 10) + (8 << 10)
