"""Tiles of packed rows in Triton: the query heads of a key-value head, of one token after another, as rows of
one product. Where a tile's rows are, their queries, and their results."""

from __future__ import annotations

import math

import triton
import triton.language as tl

# From a sink to an exponent of two.
SINK_SCALE = tl.constexpr(math.log2(math.e))


@triton.jit
def tile_place(
    starts, lengths, tasks, number, HAS_TASKS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return of a tile its sequence, the row of the sequence's first token, its first packed row, the
    position of the first token, and the packed rows of the sequence."""
    if HAS_TASKS:
        sequence = tl.load(tasks + number * 3)
        first_row = tl.load(tasks + number * 3 + 1).to(tl.int64)
        begin = tl.load(tasks + number * 3 + 2) * ROWS
        num_rows = tl.load(lengths + sequence) * GROUP
    else:
        sequence = number
        first_row = number.to(tl.int64)
        begin = tl.full((), 0, tl.int32)
        num_rows = tl.full((), GROUP, tl.int32)
    return sequence, first_row, begin, tl.load(starts + sequence), num_rows


@triton.jit
def load_queries(
    queries, query_stride, first_row, begin, num_rows, kv_head, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the queries [ROWS, PADDED_DIM] of a tile and the token of each row. Rows after the last repeat
    it, and are not stored."""
    packed = tl.minimum(begin + tl.arange(0, ROWS), num_rows - 1)
    token = packed // GROUP
    dim = tl.arange(0, PADDED_DIM)
    heads = (kv_head * GROUP + packed % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    at = (first_row + token)[:, None] * query_stride + heads
    return tl.load(queries + at, mask=dim[None, :] < HEAD_DIM, other=0.0), token


@triton.jit
def tile_positions(start, begin, num_rows, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the positions of the first and of the last token of a tile."""
    return start + begin // GROUP, start + (tl.minimum(begin + ROWS, num_rows) - 1) // GROUP


@triton.jit
def store_rows(
    largest, total, mixed, sinks, out, out_stride, first_row, packed, is_row, kv_head,
    HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Write the results of packed rows, after their sinks have joined them."""
    if HAS_SINKS:
        sink = tl.load(sinks + kv_head * GROUP + packed % GROUP) * SINK_SCALE
        most = tl.maximum(largest, sink)
        kept = tl.exp2(largest - most)
        mixed *= kept[:, None]
        total = tl.fma(total, kept, tl.exp2(sink - most))
    total = tl.where(is_row, total, 1.0)  # of rows that are not stored, which may have seen nothing
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    dim = tl.arange(0, PADDED_DIM)
    heads = (kv_head * GROUP + packed % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    at = (first_row + packed // GROUP)[:, None] * out_stride + heads
    tl.store(out + at, result, mask=is_row[:, None] & (dim[None, :] < HEAD_DIM))
