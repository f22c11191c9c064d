"""Attention over paged keys and values in Triton by pieces of keys at fixed positions: a piece has the same
bits wherever it is computed.

The keys of a sequence are cut at absolute positions: into pieces of 256 keys up to 4,096, and of 2,048 from
there on. Each piece is computed as a sequence of its own, as `attention` computes a range of keys, and pieces
are combined one after another in their order. There are two ways to do so, with the same operations:

- "split": pieces are computed side by side, their results lie in memory, and a second kernel combines them.
  This is for tokens that decode and for short chunks behind many keys, which are few programs otherwise.
- "whole": one program computes all pieces of a tile of rows and keeps what they combine to in registers.

A piece that a row does not see leaves the row as it is, so rows of one tile can see other pieces. Both ways
have products of the same instructions: on Hopper of 64 rows by 64 keys, of which a token that decodes fills
`group` rows. These products take a fifth of the time in which memory gives the keys and values.
Not yet validated on a card."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.cuda.attention import (
    INDICES,
    LEAST,
    NUM_DECODE_PROGRAMS,
    LayerKv,
    PagedSequences,
    Partials,
    Scoring,
    Tile,
    attend_range,
    padded,
)
from workers.model.cuda.card import HOPPER, Card
from workers.model.cuda.packed_rows import load_queries, store_rows, tile_place, tile_positions

# The keys of a piece among the first pieces, how many these are, and the keys of a later one.
PIECE_TOKENS, NUM_FIRST_PIECES, LATER_TOKENS = 256, 16, 2048
# The rows of a program that combines pieces.
_COMBINED_ROWS = 16


def pieced_tiles(dtype: torch.dtype, head_dim: int, card: Card) -> tuple[Tile, Tile] | None:
    """Return the tiles of rows that are split and of whole ones; None where no tile is known whose two
    sets of sums fit in registers."""
    if dtype == torch.float32:
        tile = Tile(32, 32 if head_dim <= 128 or card.has_much_shared else 16, 8, 2)
        return (tile, tile) if head_dim <= 256 else None
    if card.capability == HOPPER and head_dim <= 128:
        return Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)
    if card.capability == HOPPER and head_dim <= 256:
        return Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)
    if head_dim <= 128:
        # 64 keys would spill registers before Hopper, and on later cards where heads are small.
        num_stages = 3 if card.capability < HOPPER else 2
        tile = Tile(64, 32 if card.capability < HOPPER or head_dim <= 64 else 64, 8, num_stages)
        return tile, tile
    return None


def num_pieces(context_tokens: int) -> int:
    """Return the number of pieces of so many keys."""
    few = NUM_FIRST_PIECES * PIECE_TOKENS
    if context_tokens <= few:
        return -(-context_tokens // PIECE_TOKENS)
    return NUM_FIRST_PIECES + -(-(context_tokens - few) // LATER_TOKENS)


def allocate_partials(
    num_tiles: int,
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    context_tokens: int,
    device: torch.device,
    memory: Tensor | None = None,
) -> Partials:
    """Allocate the results of the pieces of tiles that keep so many packed rows each and see at most
    `context_tokens` keys, in `memory`, bytes that suffice, where they are given: `values` [num_tiles,
    num_kv_heads, num_pieces, num_rows, head_dim] and `sums` [num_tiles, num_kv_heads, num_pieces, num_rows,
    2], as those of `Partials` are."""
    shape = (num_tiles, num_kv_heads, num_pieces(context_tokens), num_rows)
    if memory is None:
        return Partials(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty((*shape, 2), dtype=torch.float32, device=device),
        )
    num_vectors = math.prod(shape)
    values, sums = memory.view(torch.float32)[: num_vectors * (head_dim + 2)].split(
        [num_vectors * head_dim, num_vectors * 2]
    )
    return Partials(values.view(*shape, head_dim), sums.view(*shape, 2))


def attend_split(
    queries: Tensor,
    kv: LayerKv,
    sequences: PagedSequences,
    tasks: Tensor | None,
    window: int,
    scoring: Scoring,
    tile: Tile,
    partials: Partials,
    out: Tensor,
) -> None:
    """Attend from tiles of `tile.rows` packed rows, piece by piece side by side. `queries` and `out` are
    [num_tokens, num_heads, head_dim] of the whole step, with contiguous rows. `tasks` int32 [num_tiles, 3]
    are as those of `attend_chunks`; None: sequence i has one new token, whose row is i. `partials` keep all
    rows of a tile that are used. Window 0: none. The number of programs depends on the shapes alone."""
    _, num_heads, head_dim = queries.shape
    num_kv_heads, block_tokens = kv.blocks.shape[2:4]
    num_tiles, _, most_pieces, num_rows, _ = partials.values.shape
    num_splits = min(most_pieces, max(1, triton.cdiv(NUM_DECODE_PROGRAMS, num_tiles * num_kv_heads)))
    memory, group = kv.arguments(), num_heads // num_kv_heads
    places = (sequences.starts, sequences.lengths, sequences.starts if tasks is None else tasks)
    cut = {"PIECE": PIECE_TOKENS, "FIRST_PIECES": NUM_FIRST_PIECES, "LATER": LATER_TOKENS}
    _attend_split[(num_tiles, num_kv_heads, num_splits)](
        queries, *memory, sequences.tables, sequences.slots, *places, *partials[:2],
        queries.stride(0), memory[0].stride(0), memory[1].stride(0), sequences.tables.stride(0),
        kv.first_host, most_pieces, window, scoring.exponent_scale,
        HAS_TASKS=tasks is not None, HAS_HOST=kv.in_host is not None, GROUP=group,
        KIND_STRIDE=kv.blocks.stride(1), HEAD_STRIDE=kv.blocks.stride(2), HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim), BLOCK_TOKENS=block_tokens, NUM_ROWS=num_rows, ROWS=tile.rows,
        KEYS=tile.keys, HAS_WINDOW=window > 0, CAP_SCALE=scoring.cap_scale, ELEMENTS=kv.elements, **cut,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    rows = min(_COMBINED_ROWS, triton.next_power_of_2(num_rows))
    sinks = scoring.sinks
    _combine_pieces[(num_tiles, num_kv_heads, triton.cdiv(num_rows, rows))](
        *places, *partials[:2], out if sinks is None else sinks, out, out.stride(0), most_pieces, window,
        HAS_TASKS=tasks is not None, HAS_SINKS=sinks is not None, GROUP=group, HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim), NUM_ROWS=num_rows, TILE_ROWS=tile.rows, ROWS=rows, HAS_WINDOW=window > 0,
        **cut, num_warps=4,
    )  # fmt: skip


def attend_whole(
    queries: Tensor,
    kv: LayerKv,
    sequences: PagedSequences,
    tasks: Tensor,
    window: int,
    scoring: Scoring,
    tile: Tile,
    out: Tensor,
) -> None:
    """Attend from tiles of packed rows as `attend_chunks` does, piece after piece."""
    _, num_heads, head_dim = queries.shape
    num_kv_heads, block_tokens = kv.blocks.shape[2:4]
    memory, sinks = kv.arguments(), scoring.sinks
    _attend_whole[(len(tasks), num_kv_heads)](
        queries, *memory, *sequences, tasks, out if sinks is None else sinks, out,
        queries.stride(0), out.stride(0), memory[0].stride(0), memory[1].stride(0),
        sequences.tables.stride(0), kv.first_host, window, scoring.exponent_scale,
        HAS_HOST=kv.in_host is not None, HAS_SINKS=sinks is not None, GROUP=num_heads // num_kv_heads,
        KIND_STRIDE=kv.blocks.stride(1), HEAD_STRIDE=kv.blocks.stride(2), HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim), BLOCK_TOKENS=block_tokens, ROWS=tile.rows, KEYS=tile.keys,
        HAS_WINDOW=window > 0, CAP_SCALE=scoring.cap_scale, ELEMENTS=kv.elements, PIECE=PIECE_TOKENS,
        FIRST_PIECES=NUM_FIRST_PIECES, LATER=LATER_TOKENS, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["table_stride", "most_pieces"], do_not_specialize_on_alignment=INDICES)
def _attend_split(
    queries, kv, host, scales, host_scales, tables, slots, starts, lengths, tasks, values, sums,
    query_stride, block_stride, host_stride, table_stride, first_host, most_pieces, window, scale,
    HAS_TASKS: tl.constexpr, HAS_HOST: tl.constexpr, GROUP: tl.constexpr, KIND_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    NUM_ROWS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr, ELEMENTS: tl.constexpr, PIECE: tl.constexpr, FIRST_PIECES: tl.constexpr,
    LATER: tl.constexpr,
):  # fmt: skip
    """Attend from a tile to every num_programs(2)-th of its pieces. Grid: (tiles, KV heads, any)."""
    number = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence, first_row, begin, start, num_rows = tile_place(
        starts, lengths, tasks, number, HAS_TASKS, GROUP, ROWS
    )
    q, token = load_queries(
        queries, query_stride, first_row, begin, num_rows, kv_head, GROUP, HEAD_DIM, PADDED_DIM, ROWS
    )
    oldest, newest = tile_positions(start, begin, num_rows, GROUP, ROWS)
    first_piece, last_piece = _pieces(oldest, newest, window, HAS_WINDOW, PIECE, FIRST_PIECES, LATER)
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    rows = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    is_row = rows < tl.minimum(num_rows - begin, NUM_ROWS)
    for piece in range(first_piece + tl.program_id(2), last_piece + 1, tl.num_programs(2)):
        largest, total, mixed = attend_range(
            q, start + token, oldest, newest, _begin(piece, PIECE, FIRST_PIECES, LATER),
            _begin(piece + 1, PIECE, FIRST_PIECES, LATER), kv, host, scales, host_scales, table, kv_head,
            block_stride, host_stride, first_host, window, scale, HAS_HOST, KIND_STRIDE, HEAD_STRIDE,
            HEAD_DIM, PADDED_DIM, BLOCK_TOKENS, ROWS, KEYS, HAS_WINDOW, CAP_SCALE, ELEMENTS,
        )  # fmt: skip
        of_tile = (number.to(tl.int64) * tl.num_programs(1) + kv_head) * most_pieces
        at = (of_tile + piece - first_piece) * NUM_ROWS + rows
        tl.store(sums + at * 2, largest, mask=is_row)
        tl.store(sums + at * 2 + 1, total, mask=is_row)
        to = values + at[:, None] * HEAD_DIM + dim[None, :]
        tl.store(to, mixed, mask=is_row[:, None] & (dim[None, :] < HEAD_DIM))


@triton.jit(do_not_specialize=["most_pieces"], do_not_specialize_on_alignment=INDICES)
def _combine_pieces(
    starts, lengths, tasks, values, sums, sinks, out, out_stride, most_pieces, window,
    HAS_TASKS: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, NUM_ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PIECE: tl.constexpr, FIRST_PIECES: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Combine the pieces of some rows of a tile and their sinks. Grid: (tiles, KV heads, blocks of rows)."""
    number = tl.program_id(0)
    kv_head = tl.program_id(1)
    _, first_row, begin, start, num_rows = tile_place(
        starts, lengths, tasks, number, HAS_TASKS, GROUP, TILE_ROWS
    )
    oldest, newest = tile_positions(start, begin, num_rows, GROUP, TILE_ROWS)
    first_piece, last_piece = _pieces(oldest, newest, window, HAS_WINDOW, PIECE, FIRST_PIECES, LATER)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = rows < tl.minimum(num_rows - begin, NUM_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    is_loaded = is_row[:, None] & (dim[None, :] < HEAD_DIM)
    largest = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    of_tile = (number.to(tl.int64) * tl.num_programs(1) + kv_head) * most_pieces
    for piece in tl.range(0, last_piece - first_piece + 1, num_stages=3):
        at = (of_tile + piece) * NUM_ROWS + rows
        other_largest = tl.load(sums + at * 2, mask=is_row, other=LEAST)
        other_total = tl.load(sums + at * 2 + 1, mask=is_row, other=0.0)
        other = tl.load(values + at[:, None] * HEAD_DIM + dim[None, :], mask=is_loaded, other=0.0)
        largest, total, mixed = _combined(largest, total, mixed, other_largest, other_total, other)
    packed = tl.minimum(begin + rows, num_rows - 1)
    store_rows(
        largest, total, mixed, sinks, out, out_stride, first_row, packed, is_row, kv_head, HAS_SINKS, GROUP,
        HEAD_DIM, PADDED_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=INDICES)
def _attend_whole(
    queries, kv, host, scales, host_scales, tables, slots, starts, lengths, tasks, sinks, out,
    query_stride, out_stride, block_stride, host_stride, table_stride, first_host, window, scale,
    HAS_HOST: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, KIND_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr,
    ELEMENTS: tl.constexpr, PIECE: tl.constexpr, FIRST_PIECES: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of packed rows of a sequence, piece after piece. Grid: (tiles, KV heads)."""
    kv_head = tl.program_id(1)
    sequence, first_row, begin, start, num_rows = tile_place(
        starts, lengths, tasks, tl.program_id(0), True, GROUP, ROWS
    )
    q, token = load_queries(
        queries, query_stride, first_row, begin, num_rows, kv_head, GROUP, HEAD_DIM, PADDED_DIM, ROWS
    )
    oldest, newest = tile_positions(start, begin, num_rows, GROUP, ROWS)
    first_piece, last_piece = _pieces(oldest, newest, window, HAS_WINDOW, PIECE, FIRST_PIECES, LATER)
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    largest = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for piece in range(first_piece, last_piece + 1):
        other_largest, other_total, other = attend_range(
            q, start + token, oldest, newest, _begin(piece, PIECE, FIRST_PIECES, LATER),
            _begin(piece + 1, PIECE, FIRST_PIECES, LATER), kv, host, scales, host_scales, table, kv_head,
            block_stride, host_stride, first_host, window, scale, HAS_HOST, KIND_STRIDE, HEAD_STRIDE,
            HEAD_DIM, PADDED_DIM, BLOCK_TOKENS, ROWS, KEYS, HAS_WINDOW, CAP_SCALE, ELEMENTS,
        )  # fmt: skip
        largest, total, mixed = _combined(largest, total, mixed, other_largest, other_total, other)
    rows = begin + tl.arange(0, ROWS)
    packed = tl.minimum(rows, num_rows - 1)
    store_rows(
        largest, total, mixed, sinks, out, out_stride, first_row, packed, rows < num_rows, kv_head, HAS_SINKS,
        GROUP, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip


@triton.jit
def _pieces(
    oldest, newest, window, HAS_WINDOW: tl.constexpr, PIECE: tl.constexpr, FIRST_PIECES: tl.constexpr,
    LATER: tl.constexpr,
):  # fmt: skip
    """Return the first and the last piece with keys that some position from `oldest` to `newest` sees."""
    first = tl.full((), 0, tl.int32)
    if HAS_WINDOW:
        first = _piece_of(tl.maximum(oldest - window + 1, 0), PIECE, FIRST_PIECES, LATER)
    return first, _piece_of(newest, PIECE, FIRST_PIECES, LATER)


@triton.jit
def _piece_of(position, PIECE: tl.constexpr, FIRST_PIECES: tl.constexpr, LATER: tl.constexpr):
    """Return the piece that has a position."""
    later = FIRST_PIECES + (position - FIRST_PIECES * PIECE) // LATER
    return tl.where(position < FIRST_PIECES * PIECE, position // PIECE, later)


@triton.jit
def _begin(piece, PIECE: tl.constexpr, FIRST_PIECES: tl.constexpr, LATER: tl.constexpr):
    """Return the first position of a piece."""
    later = FIRST_PIECES * PIECE + (piece - FIRST_PIECES) * LATER
    return tl.where(piece < FIRST_PIECES, piece * PIECE, later)


@triton.jit
def _combined(largest, total, mixed, other_largest, other_total, other):
    """Return what rows and one more piece combine to: largest exponent, sum of weights, and weighted
    values."""
    most = tl.maximum(largest, other_largest)
    kept = tl.exp2(largest - most)
    weight = tl.exp2(other_largest - most)
    total = tl.fma(other_total, weight, total * kept)
    weights = tl.broadcast_to(weight[:, None], other.shape)
    return most, total, tl.fma(other, weights, mixed * kept[:, None])
