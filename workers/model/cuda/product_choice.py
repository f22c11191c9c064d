"""The choice of the product of `deterministic: true` on a device.

`segmented_product` is chosen in 16 bits, once it has been tried on the device: it compiles, equals the
product of one tile within rounding, and a row has the same bits in all of its tiles. Otherwise, and in
float32, which tensor cores do not multiply, `invariant_product` computes, which a card has validated."""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import torch
from torch import Tensor

from workers.model.cuda import invariant_product, segmented_product
from workers.model.cuda.card import card_of, compiles
from workers.model.cuda.segmented_product import RowTile, row_tiles

_log = logging.getLogger("tandem.rank")
_NAME = "the segmented product of deterministic mode"
# The sizes of what is tried: rows for every tile, outputs of several, and inputs of several segments.
_NUM_ROWS, _NUM_OUTPUTS, _NUM_INPUTS = 300, 200, 1536
# The difference of sums in other orders, over the largest sum.
_TOLERANCE = 1e-4


class InvariantProduct(Protocol):
    """A product in which a row's result depends on nothing else, as `invariant_product.multiply` is."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, is_added: bool = False
    ) -> None: ...


def chosen_product(device: torch.device, dtype: torch.dtype) -> InvariantProduct:
    """Return the product for weights of a dtype on a device."""
    tiles = agreeing_tiles(device, dtype) if dtype in segmented_product.DTYPES else ()
    return functools.partial(segmented_product.multiply, tiles=tiles) if tiles else invariant_product.multiply


@functools.cache
def agreeing_tiles(device: torch.device, dtype: torch.dtype) -> tuple[RowTile, ...]:
    """Return the tiles in which rows have the same bits on a device, of few rows first: all of the card or,
    where they differ, that of 64 rows alone. Returns nothing where they cannot be used."""
    tiles = row_tiles(card_of(device).capability)
    if device.type != "cuda":  # in the interpreter, which takes long for a trial
        return tiles
    return tried_tiles(device, dtype, tiles)


def tried_tiles(device: torch.device, dtype: torch.dtype, tiles: tuple[RowTile, ...]) -> tuple[RowTile, ...]:
    """Try tiles on a device, and return those that can be used together."""
    draw = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randn(num, _NUM_INPUTS, generator=draw).to(device, dtype) for num in (_NUM_ROWS, _NUM_OUTPUTS)
    )
    results = [
        torch.empty(_NUM_ROWS, _NUM_OUTPUTS, dtype=torch.float32, device=device)
        for _ in range(len(tiles) + 1)
    ]

    def run() -> None:
        for tile, out in zip(tiles, results[1:], strict=True):
            # In several segments of one launch, and of a launch for each.
            segmented_product.multiply(x, weight, None, out, tiles=(tile,))
            segmented_product.multiply(
                x[: _NUM_ROWS // 3], weight, None, out[: _NUM_ROWS // 3], tiles=(tile,)
            )

    if not compiles(_NAME, run):
        return ()
    invariant_product.multiply(x, weight, None, results[0])
    known, first, *others = results
    if float((first - known).abs().max()) > _TOLERANCE * float(known.abs().max()):
        _log.warning("%s differs from the product of one tile on this device, which is taken", _NAME)
        return ()
    if all(torch.equal(first, it) for it in others):
        return tiles
    _log.warning("%s has other bits in other tiles on this device: one serves all rows", _NAME)
    return tuple(it for it in tiles if it.rows == 64)
