"""Products whose sums have one order for a weight: their results, bits, launches and choice."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launch_recorder import recorded_launches
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from triton.runtime.errors import OutOfResources

from workers.model.cuda import invariant_product, product_choice, segmented_product
from workers.model.cuda.card import Card, card_of
from workers.model.cuda.product_choice import chosen_product, tried_tiles
from workers.model.cuda.segmented_product import multiply, row_tiles, segments_of, tile_for

DTYPES = [torch.float16, torch.bfloat16]
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2**-6}
# Rows in each of the tiles, in one that is not full, and in several.
NUM_ROWS = (1, 16, 40, 100, 260)


def drawn(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Draw rows, a weight [num_outputs, num_inputs] and a bias, of products of about 1."""
    _, num_outputs, num_inputs = shape
    draw = torch.Generator().manual_seed(num_outputs)
    x, weight, bias = (torch.randn(*it, generator=draw) for it in (shape[::2], shape[1:], shape[1:2]))
    return tuple(it.to(device, dtype) for it in (x, weight * num_inputs**-0.5, bias))


@pytest.mark.parametrize(("seed", "capability"), [(0, 90), (1, 80), (2, 80), (3, 90)])
def test_rows_have_the_same_bits_in_any_number(device: torch.device, seed: int, capability: int) -> None:
    """Of drawn shapes, with one segment and several; and rounded, the results of torch."""
    draw = np.random.default_rng(seed)
    num_outputs, num_inputs = int(draw.integers(1, 170)), int(draw.choice([40, 64, 500, 1024, 2100]))
    dtype, has_bias = DTYPES[seed % 2], bool(seed // 2)
    x, weight, bias = drawn((NUM_ROWS[-1], num_outputs, num_inputs), dtype, device)
    expected = F.linear(x.float(), weight.float(), bias.float() if has_bias else None)
    tiles = row_tiles(card_of(device).capability if device.type == "cuda" else capability)
    known: Tensor | None = None
    for num_rows in reversed(NUM_ROWS):
        first = int(draw.integers(0, len(x) - num_rows + 1))
        rows = slice(first, first + num_rows)
        out = torch.empty(num_rows, num_outputs, dtype=dtype, device=device)
        multiply(x[rows], weight, bias if has_bias else None, out, tiles=tiles)
        known = out if known is None else known
        assert torch.equal(out, known[rows]), num_rows
    assert known is not None
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(known.float(), expected, rtol=tolerance, atol=tolerance)
    hidden = torch.ones_like(known)
    multiply(x, weight, bias if has_bias else None, hidden, tiles=tiles, is_added=True)
    torch.testing.assert_close(hidden, 1 + known, rtol=tolerance, atol=tolerance)


def test_segments_follow_from_the_weight() -> None:
    """Weights of Llama 3 8B: of queries, keys and values, of the output, and of the feed-forward."""
    shapes = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096)]
    assert [segments_of(*shape).num_segments for shape in shapes] == [1, 2, 1, 2, 1]
    assert segments_of(4096, 14_336).num_inputs == 7168
    assert segments_of(100, 500) == (512, 1)
    assert segments_of(100, 2100) == (576, 4)


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_tiles_have_all_rows_of_few(capability: int) -> None:
    tiles = row_tiles(capability)
    for num_rows in (1, 16, 17, 32, 33, 64):
        assert num_rows <= tile_for(tiles, num_rows, 4096).rows < max(17, 2 * num_rows)
    assert tile_for(tiles, 5000, 28_672) == tiles[-1]
    assert tile_for(row_tiles(90), 256, 4096).rows == 128, "32 programs would read a weight"


def test_launches_and_bytes_of_few_rows(device: torch.device) -> None:
    """A weight in several segments takes two launches, others one; the sums of segments are a small part of
    what the weight is."""
    tiles = row_tiles(card_of(device).capability)
    for num_inputs, launches in ((2048, 2), (500, 1)):
        x, weight, _ = drawn((3, 130, num_inputs), torch.float16, device)
        with recorded_launches() as found:
            multiply(x, weight, None, torch.empty(3, 130, dtype=torch.float16, device=device), tiles=tiles)
        assert len(found) == launches, found
    segments = segments_of(4096, 4096).num_segments
    written_and_read = 2 * segments * 32 * 4096 * 4
    assert written_and_read / (4096 * 4096 * 2) < 0.07


def test_it_is_chosen_where_it_can_be_used(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are wrong, do not compile, or have other bits in other tiles are not."""
    for name, size in (("_NUM_ROWS", 30), ("_NUM_OUTPUTS", 20), ("_NUM_INPUTS", 1100)):
        monkeypatch.setattr(product_choice, name, size)
    dtype, tiles = torch.float16, row_tiles(90)[:3]
    assert tried_tiles(device, dtype, tiles) == tiles
    assert isinstance(chosen_product(device, dtype), functools.partial)
    assert chosen_product(device, torch.float32) is invariant_product.multiply
    own = segmented_product.multiply

    def multiply_with(factor: float, rows: int = 0) -> None:
        """Let products be wrong by a factor, or those in the tile of some rows."""

        def wrong(x: Tensor, weight: Tensor, bias: Any, out: Tensor, **options: Any) -> None:
            own(x, weight, bias, out, **options)
            if not rows or options["tiles"][0].rows == rows:
                out.mul_(factor)

        monkeypatch.setattr(segmented_product, "multiply", wrong)

    multiply_with(1.1)
    assert tried_tiles(device, dtype, tiles) == ()
    multiply_with(1.000001, 32)
    assert [it.rows for it in tried_tiles(device, dtype, tiles)] == [64]
    monkeypatch.setattr(segmented_product, "multiply", refuse)
    assert tried_tiles(device, dtype, tiles) == ()


def refuse(*_: Any, **__: Any) -> None:
    raise OutOfResources(1 << 20, 99 << 10, "shared memory")


def test_errors_of_the_device_are_none_of_the_compiler(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(segmented_product, "multiply", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tried_tiles(device, torch.float16, row_tiles(90))


def test_unknown_cards_get_the_least_shared_memory() -> None:
    assert Card(75).shared_bytes == Card(89).shared_bytes < Card(80).shared_bytes < Card(90).shared_bytes
    assert [Card(it).has_descriptors for it in (80, 89, 90, 100)] == [False, False, True, True]
