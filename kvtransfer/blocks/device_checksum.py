"""Copies of pieces on a device with their checksums, in one pass over the bytes: kernels in Triton.

The sums are those of `kvtransfer.blocks.checksum`, bit for bit. A kernel reads a piece where it lies and
writes it, if it is to be written, where it goes: another process's memory too, once that is mapped. Without
CUDA the kernels run in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtransfer.blocks.checksum import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, SHIFT, WORD_BYTES
from kvtransfer.blocks.layout import Grid

# Words that one program reads.
_MOST_TILE_WORDS = 4096
_NUM_WARPS = 8

_GOLDEN = tl.constexpr(GOLDEN)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)
_SHIFT = tl.constexpr(SHIFT)


def copy_pieces(
    src: torch.Tensor,
    src_ids: torch.Tensor,
    dst: torch.Tensor | None,
    dst_ids: torch.Tensor,
    grid: Grid,
    *,
    is_summed: bool,
) -> torch.Tensor:
    """Copy the piece `grid` of block `src_ids[i]` of `src` to block `dst_ids[i]` of `dst` (None: nowhere).

    `src` and `dst` are int64 [num_blocks, block_words], ids int64 [num_pieces], all on one device, or mapped
    there. Returns the pieces' sums S of mixed words, int64 [num_pieces], or without `is_summed` nothing: [0].
    Only queues work, on the current stream. All of `grid` must be whole words."""
    assert all(num_bytes % WORD_BYTES == 0 for num_bytes in grid[:-1]), grid
    row_words = grid.row_bytes // WORD_BYTES
    tile_words = min(_MOST_TILE_WORDS, triton.next_power_of_2(row_words))
    num_tiles = triton.cdiv(row_words, tile_words)
    num_pieces = len(src_ids)
    shape = (num_pieces, grid.num_rows * num_tiles) if is_summed else (0,)
    totals = torch.empty(shape, dtype=torch.int64, device=src_ids.device)
    if num_pieces:
        _copy_tile[(num_tiles, grid.num_rows, num_pieces)](
            src,
            src_ids,
            src if dst is None else dst,
            dst_ids,
            totals,
            src.stride(0),
            grid.src_offset // WORD_BYTES,
            grid.src_pitch // WORD_BYTES,
            0 if dst is None else dst.stride(0),
            grid.dst_offset // WORD_BYTES,
            grid.dst_pitch // WORD_BYTES,
            row_words,
            TILE=tile_words,
            COPIES=dst is not None,
            SUMS=is_summed,
            num_warps=_NUM_WARPS,
        )
    return totals.sum(dim=-1) if is_summed else totals


@triton.jit
def _mix(word):
    word ^= word >> _SHIFT
    word *= _MULTIPLIER_1
    word ^= word >> _SHIFT
    word *= _MULTIPLIER_2
    return word ^ (word >> _SHIFT)


@triton.jit
def _copy_tile(
    src,
    src_ids,
    dst,
    dst_ids,
    totals,
    src_block_words,
    src_offset,
    src_pitch,
    dst_block_words,
    dst_offset,
    dst_pitch,
    row_words,
    TILE: tl.constexpr,
    COPIES: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Copy or sum, or both, TILE words of one row of one piece: programs [tile, row, piece]."""
    tile, row, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tile * TILE + tl.arange(0, TILE)
    inside = columns < row_words
    first = tl.load(src_ids + piece) * src_block_words + src_offset + row.to(tl.int64) * src_pitch
    words = tl.load(src + first + columns, mask=inside, other=0)
    if COPIES:
        first = tl.load(dst_ids + piece) * dst_block_words + dst_offset + row.to(tl.int64) * dst_pitch
        tl.store(dst + first + columns, words, mask=inside)
    if SUMS:
        positions = row.to(tl.int64) * row_words + columns + 1
        mixed = _mix(words.to(tl.uint64, bitcast=True) + positions.to(tl.uint64, bitcast=True) * _GOLDEN)
        total = tl.sum(tl.where(inside, mixed, 0).to(tl.int64, bitcast=True), axis=0)
        place = (piece.to(tl.int64) * tl.num_programs(1) + row) * tl.num_programs(0) + tile
        tl.store(totals + place, total)
