"""The choice of attention by pieces on a device: it is tried there before it is used.

The former kernels of `attention` have been validated on a card. Attention by pieces takes their place where
it compiles, equals them within rounding and, for `deterministic: true`, gives a row the same bits in both of
its ways and wherever in a tile the row is. The trial takes milliseconds once kernels are compiled."""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.attention.quantized_kv import elements_and_scales, is_quantized
from workers.model.cuda import pieced_attention
from workers.model.cuda.attention import LayerKv, PagedSequences, Scoring, Tile, attend_chunks, chunk_tile
from workers.model.cuda.card import card_of, compiles
from workers.model.cuda.pieced_attention import (
    allocate_partials,
    attend_split,
    attend_whole,
    pieced_tiles,
)
from workers.model.kv_form import SCALE_BYTES

_log = logging.getLogger("tandem.rank")
_NAME = "attention by pieces"
# The key-value heads and the new tokens of the trial, of which the last is also computed as a decode.
_NUM_HEADS, _NUM_TOKENS = 2, 40
# The largest difference from the former kernels, over the largest result.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class PiecedTiles(NamedTuple):
    """The tiles of attention by pieces on a device, `split` and `whole`; `is_invariant`: rows have the same
    bits in both."""

    split: Tile
    whole: Tile
    is_invariant: bool


class AttentionKind(NamedTuple):
    """What attention compiles kernels for: dtypes of queries and KV, the size of a head and of a block, and
    the query heads of a key-value head."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    block_tokens: int
    group: int


@functools.cache
def usable_tiles(device: torch.device, kind: AttentionKind) -> PiecedTiles | None:
    """Return the tiles for a kind of attention on a device; None where the former kernels remain."""
    tiles = pieced_tiles(kind.dtype, kind.head_dim, card_of(device))
    if tiles is None or kind.group > tiles[0].rows:
        return None
    split, whole = tiles
    if device.type == "cuda":
        return tried_tiles(device, kind, split, whole)
    return PiecedTiles(split, whole, is_invariant=True)  # in the interpreter, which takes seconds for a trial


def tried_tiles(device: torch.device, kind: AttentionKind, split: Tile, whole: Tile) -> PiecedTiles | None:
    """Try tiles on a device, and return what of them can be used there."""
    for each in dict.fromkeys((whole, split)):
        trial = _Trial(device, kind)
        if not compiles(f"{_NAME} ({kind})", functools.partial(trial.run, split, each)):
            return None
        if not trial.equals_former():
            _log.warning("%s (%s) differs from the former kernels, which are taken", _NAME, kind)
            return None
        if trial.is_invariant():
            return PiecedTiles(split, each, is_invariant=True)
    _log.warning("%s (%s) has other bits in other tiles on this device", _NAME, kind)
    return PiecedTiles(split, whole, is_invariant=False)


class _Trial:
    """A sequence of three pieces of keys, drawn, and its last tokens in all ways of attention."""

    def __init__(self, device: torch.device, kind: AttentionKind) -> None:
        draw = torch.Generator().manual_seed(2)
        context = 2 * pieced_attention.PIECE_TOKENS + kind.block_tokens
        num_blocks = -(-context // kind.block_tokens)
        shape = (num_blocks, 2, _NUM_HEADS, kind.block_tokens, kind.head_dim)
        self._kv = _drawn_kv(shape, kind, draw).to(device)
        num_heads = _NUM_HEADS * kind.group
        self._queries = torch.randn(_NUM_TOKENS, num_heads, kind.head_dim, generator=draw).to(
            device, kind.dtype
        )
        self._kind, self._device, self._context = kind, device, context
        self._former, self._whole, self._split = (torch.empty_like(self._queries) for _ in range(3))
        self._decoded = torch.empty_like(self._queries[-1:])

    def run(self, split: Tile, whole: Tile) -> None:
        kind, scoring = self._kind, Scoring(self._kind.head_dim**-0.5)
        kv = LayerKv.of(self._kv, kind.head_dim)
        table = torch.arange(len(self._kv), dtype=torch.int32, device=self._device)[None]
        chunk = self._sequences(table, self._context - _NUM_TOKENS, _NUM_TOKENS)

        def tasks(tile_rows: int) -> Tensor:
            return self._ids([[0, 0, it] for it in range(-(-_NUM_TOKENS * kind.group // tile_rows))])

        former = tasks(chunk_tile(kind.dtype, kind.head_dim, card_of(self._device)).rows)
        attend_chunks(self._queries, kv, chunk, former, 0, scoring, self._former)
        attend_whole(self._queries, kv, chunk, tasks(whole.rows), 0, scoring, whole, self._whole)
        of_split, heads = tasks(split.rows), (_NUM_HEADS, kind.head_dim, self._context, self._device)
        partials = allocate_partials(len(of_split), split.rows, *heads)
        attend_split(self._queries, kv, chunk, of_split, 0, scoring, split, partials, self._split)
        last = self._sequences(table, self._context - 1, 1)
        partials = allocate_partials(1, kind.group, *heads)
        attend_split(self._queries[-1:], kv, last, None, 0, scoring, split, partials, self._decoded)

    def equals_former(self) -> bool:
        most = _TOLERANCE[self._kind.dtype] * float(self._former.abs().max())
        return all(float((it - self._former).abs().max()) <= most for it in (self._whole, self._split))

    def is_invariant(self) -> bool:
        return torch.equal(self._whole, self._split) and torch.equal(self._decoded, self._whole[-1:])

    def _sequences(self, table: Tensor, start: int, count: int) -> PagedSequences:
        return PagedSequences(table, *(self._ids([it]) for it in (0, start, count)))

    def _ids(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def _drawn_kv(shape: tuple[int, ...], kind: AttentionKind, draw: torch.Generator) -> Tensor:
    """Return one layer of KV of the kind's dtype, with the bytes of scales where it has them."""
    drawn = torch.randn(shape, generator=draw)
    if not is_quantized(torch.empty(0, dtype=kind.kv_dtype)):
        return drawn.to(kind.kv_dtype)
    layer = torch.zeros(*shape[:-1], shape[-1] + SCALE_BYTES, dtype=torch.uint8).view(kind.kv_dtype)
    elements, scales = elements_and_scales(layer, kind.head_dim)
    elements.copy_((drawn * 16).to(kind.kv_dtype))
    scales.fill_(1 / 16)
    return layer
