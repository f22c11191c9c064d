"""The tiles that are chosen by card: by arithmetic they fit in shared memory and registers, before
`card_table.py` asks the compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from workers.model.cuda.attention import Tile, chunk_tile, decode_tile, padded
from workers.model.cuda.card import Card
from workers.model.cuda.latent_attention import latent_tile
from workers.model.cuda.pieced_attention import pieced_tiles
from workers.model.cuda.segmented_product import INPUTS, row_tiles

CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
GROUPS = (1, 4, 8, 16)
RANK, ROPE = 512, 64
# The others multiply by warps.
WITH_GROUP_PRODUCTS = (90, 100, 103)
# The registers of a thread that sums may take, of 255: addresses and factors need the others.
MOST_SUMS = 176


def tiles(card: Card, dtype: torch.dtype, head_dim: int) -> Iterator[tuple[str, Tile, int]]:
    """Yield the kernels of attention, their tiles, and how many sets of sums of values they hold."""
    yield "chunks", chunk_tile(dtype, head_dim, card), 1
    for group in GROUPS:
        yield f"decodes, group {group}", decode_tile(dtype, head_dim, group, card), 1
    pieced = pieced_tiles(dtype, head_dim, card)
    if pieced is not None:
        yield "split", pieced[0], 1
        yield "whole", pieced[1], 2


def shared_bytes(tile: Tile, width: int, num_parts: int, dtype: torch.dtype, card: Card) -> int:
    """Return the shared memory of queries, of weights of keys, and of the tiles of keys and values on their
    way: where warpgroups multiply, the one that is computed lies there as well."""
    num_tiles = tile.num_stages - (card.capability not in WITH_GROUP_PRODUCTS)
    items = tile.rows * (width + tile.keys) + num_tiles * num_parts * tile.keys * width
    return items * dtype.itemsize


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_attention_fits_a_card(capability: int) -> None:
    card = Card(capability)
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for name, tile, num_sets in tiles(card, dtype, head_dim):
                where = f"{name}, {dtype}, heads of {head_dim}: {tile}"
                width = padded(head_dim)
                assert shared_bytes(tile, width, 2, dtype, card) <= card.shared_bytes, where
                sums = tile.rows * (num_sets * width + tile.keys) / (32 * tile.num_warps)
                assert sums <= MOST_SUMS, where


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_latents_fit_a_card(capability: int) -> None:
    card = Card(capability)
    for dtype in DTYPES:
        for num_rows in (1, 16, 64, 128):
            tile = latent_tile(dtype, num_rows)
            assert shared_bytes(tile, padded(RANK) + padded(ROPE), 1, dtype, card) <= card.shared_bytes
            assert tile.rows * (RANK + tile.keys) / (32 * tile.num_warps) <= MOST_SUMS


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_fit_a_card(capability: int) -> None:
    card = Card(capability)
    for tile in row_tiles(capability):
        stage = 2 * INPUTS * (tile.rows + tile.outputs)
        assert (tile.num_stages - (capability not in WITH_GROUP_PRODUCTS)) * stage <= card.shared_bytes, tile
        assert tile.rows * tile.outputs / (32 * tile.num_warps) <= MOST_SUMS, tile
