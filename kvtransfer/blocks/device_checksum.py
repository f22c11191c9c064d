"""Copies of pieces on a device with their checksums, in one pass over the bytes: kernels in Triton.

The sums are those of `kvtransfer.blocks.checksum`, bit for bit. A kernel reads a piece where it lies and
writes it, if it is to be written, where it goes. That is an address, so that it may be another process's
memory, of a card that this process does not see, once that is mapped. Without CUDA the kernels run in
Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtransfer.blocks.checksum import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, SHIFT, WORD_BYTES
from kvtransfer.blocks.layout import Grid

# The alignment of an address for which the compiler writes several words at a time.
_ALIGNED_BYTES = 16
# Words that one program reads.
_MOST_TILE_WORDS = 4096
_NUM_WARPS = 8

_GOLDEN = tl.constexpr(GOLDEN)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)
_SHIFT = tl.constexpr(SHIFT)
_ALIGNED = tl.constexpr(_ALIGNED_BYTES)


def copy_pieces(
    src: torch.Tensor,
    dst: int | None,
    dst_block_bytes: int,
    table: torch.Tensor,
    num_pieces: int,
    grid: Grid,
    *,
    is_summed: bool,
) -> None:
    """Copy the piece `grid` of blocks of `src` to blocks of `dst` (None: nowhere), all by one kernel.

    `src` is int64 [num_blocks, block_words], `dst` the address of blocks of `dst_block_bytes`, and `table`
    that of a `PieceTable`: int64 source ids, target ids and zeros, `num_pieces` each. `src` and `table` are
    on one device, which can reach `dst`. With `is_summed` each piece's sum S of mixed words is added to its
    zero. Sums wrap modulo 2^64, so the order in which programs add changes no bit. Only queues work, on the
    current stream. All of `grid`, the address and the size of blocks must be whole words."""
    assert all(num_bytes % WORD_BYTES == 0 for num_bytes in (*grid[:-1], dst or 0, dst_block_bytes)), grid
    row_words = grid.row_bytes // WORD_BYTES
    tile_words = min(_MOST_TILE_WORDS, triton.next_power_of_2(row_words))
    num_tiles = triton.cdiv(row_words, tile_words)
    if not num_pieces:
        return
    _copy_tile[(num_tiles, grid.num_rows, num_pieces)](
        src,
        dst or 0,
        table,
        src.stride(0),
        grid.src_offset // WORD_BYTES,
        grid.src_pitch // WORD_BYTES,
        dst_block_bytes // WORD_BYTES,
        grid.dst_offset // WORD_BYTES,
        grid.dst_pitch // WORD_BYTES,
        row_words,
        TILE=tile_words,
        COPIES=dst is not None,
        ALIGNED=(dst or 0) % _ALIGNED_BYTES == 0,
        SUMS=is_summed,
        num_warps=_NUM_WARPS,
    )


@triton.jit
def _mix(word):
    word ^= word >> _SHIFT
    word *= _MULTIPLIER_1
    word ^= word >> _SHIFT
    word *= _MULTIPLIER_2
    return word ^ (word >> _SHIFT)


@triton.jit(do_not_specialize=["dst"])
def _copy_tile(
    src,
    dst,
    table,
    src_block_words,
    src_offset,
    src_pitch,
    dst_block_words,
    dst_offset,
    dst_pitch,
    row_words,
    TILE: tl.constexpr,
    COPIES: tl.constexpr,
    ALIGNED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Copy or sum, or both, TILE words of one row of one piece: programs [tile, row, piece]. `dst` is an
    address, ALIGNED or not."""
    tile, row, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tile * TILE + tl.arange(0, TILE)
    inside = columns < row_words
    num_pieces = tl.num_programs(2)
    first = tl.load(table + piece) * src_block_words + src_offset + row.to(tl.int64) * src_pitch
    words = tl.load(src + first + columns, mask=inside, other=0)
    if COPIES:
        first = (
            tl.load(table + num_pieces + piece) * dst_block_words + dst_offset + row.to(tl.int64) * dst_pitch
        )
        blocks = dst.to(tl.int64).to(tl.pointer_type(tl.int64))
        if ALIGNED:
            blocks = tl.multiple_of(blocks, _ALIGNED)
        tl.store(blocks + first + columns, words, mask=inside)
    if SUMS:
        positions = row.to(tl.int64) * row_words + columns + 1
        mixed = _mix(words.to(tl.uint64, bitcast=True) + positions.to(tl.uint64, bitcast=True) * _GOLDEN)
        total = tl.sum(tl.where(inside, mixed, 0).to(tl.int64, bitcast=True), axis=0)
        tl.atomic_add(table + 2 * num_pieces + piece, total, sem="relaxed")
