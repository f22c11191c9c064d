"""The kernels that are chosen by card, as the compiler makes them for cards of three kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from workers.model.cuda.card import HOPPER, Card

# What Triton 3.6 spills on 8.9, four registers of a thread, so that two programs share a multiprocessor.
ADA, MOST_SPILLED_BYTES = 89, {"_attend_split": 16}


@pytest.mark.parametrize("capability", [ADA, 90, 100])
def test_kernels_fit_a_card(capability: int, tmp_path: Path) -> None:
    """In shared memory and in registers; products are those of the card's tensor cores."""
    from hopper_compiler import compile_by_script

    script = Path(__file__).parent / "compile_cards.py"
    kernels = compile_by_script(script, tmp_path, str(capability), "products,128", "bfloat16", "few")
    names = {it["name"] for it in kernels}
    products = {"_segmented_product_kernel", "_thin_product_kernel"}
    assert names >= products | {"_attend_split", "_attend_whole", "_attend_tiles"}
    assert max(it["shared_bytes"] for it in kernels) <= Card(capability).shared_bytes
    allowed = MOST_SPILLED_BYTES if capability == ADA else {}
    assert [it for it in kernels if it["stack_bytes"] > allowed.get(it["name"], 0)] == []
    wide = [it for it in kernels if it["name"] in ("_segmented_product_kernel", "_attend_whole")]
    kind = "num_warp_products" if capability < HOPPER else "num_group_products"
    assert min(it[kind] for it in wide) > 0
    for kernel in (it for it in kernels if it["name"] == "_thin_product_kernel"):
        assert kernel["num_warp_products"] > 0
        assert kernel["num_copies"] > 0
