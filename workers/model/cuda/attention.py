"""Attention over paged keys and values in Triton: of rows that decode, and of chunks of prompts.

Blocks are read where they lie, also in pinned host memory. The query heads of a key-value head are rows of
the same products ("packed"): group = num_heads / num_kv_heads rows a token. Scores, probabilities, their
sums and the accumulated values are float32; the products take queries, keys, values and probabilities in the
dtype of the KV. Keys that no row of a program sees are not read, and masks are computed only for tiles at the
border of what is seen, so bytes after a sequence's end may hold anything. The sink of a head, if it has one,
joins the sum of a row last, where the row's keys are done or its pieces are combined.

The computation for a token of a chunk, and its order, depend on its position and its window alone, not on the
other sequences of a step, nor on where a chunk begins: tiles of keys begin at absolute positions, a tile that
a row does not see leaves its state as it is, and the kernel has one size of tile. The pieces of rows that
decode begin at absolute positions too, but are shorter where few rows decode.

The sizes are for Hopper in bfloat16 at head_dim 128. The tensor cores of a multiprocessor do 2,048
multiply-adds a cycle, and of an H200's 4.8 TB/s each of 132 multiprocessors has 20 bytes a cycle.

- Chunks: 128 rows by 64 keys. The accumulator of 128 x 128 and the scores of 128 x 64 take 96 registers a
  thread with 8 warps (two warpgroups of 64 rows each); with 4 warps they spill. A tile of keys and values
  is 32 KiB: three of them and the queries take 128 of 227 KiB of shared memory, and the registers leave
  space for one program a multiprocessor. A tile is 2.1 million multiply-adds, 1,024 cycles, so a
  multiprocessor reads 32 bytes a cycle at full rate. They come from the L2 cache, because the tiles of a
  chunk read the same keys at about the same time. 64 rows would read twice as much.
- Decode: 16 rows, the fewest of a tensor core's product, by 64 keys. The kernel is bound by memory, since a
  key is used for `group` rows only. With 4 warps and two tiles on their way, three programs fit on a
  multiprocessor and have up to 192 KiB on their way, where 36 KiB cover a latency of 1 us.
- Pieces: 512 keys are 256 KiB of keys and values and leave 2 KiB of partial results for 4 heads, so the
  second pass adds 2 % of traffic. One sequence of 8k tokens with 8 key-value heads is 128 programs. Up to 16
  rows have pieces of 256 keys and up to 8 of 128: one sequence of 1k tokens is 64 programs and not 16. A row
  has at most 32 pieces, which bounds the partial results: where it sees more, pieces double.

The sizes in registers and shared memory are those that the compiler reports."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.attention.quantized_kv import elements_and_scales, is_quantized
from workers.model.cuda.card import HOPPER, Card, card_of
from workers.model.cuda.kv_elements import ELEMENTS, SCALE, raw_elements, unit, widened
from workers.model.cuda.packed_rows import (
    SINK_SCALE,
    load_queries,
    store_rows,
    tile_place,
    tile_positions,
)

PIECE_TOKENS = 512
# Up to 16 rows have pieces of half as many keys, and up to 8 of the least number, so that few rows are more
# programs.
FEW_ROWS, LEAST_PIECE_TOKENS = 16, 128
# The most pieces of a row, a power of two.
MAX_PIECES = 32
# The number of programs of `attend_decodes` that suffices, 16 a multiprocessor, which hide that some end
# early; and the fewest for a sequence and key-value head, so that a long sequence in a large batch is not
# left to one.
NUM_DECODE_PROGRAMS, MIN_SPLITS = 2048, 4
# The arguments of which a program reads few items; a kernel for each combination of their alignments would
# gain nothing.
INDICES = ["tables", "slots", "starts", "lengths", "tasks", "sinks"]
# The stages of the pipeline over KV of 8 bits. Scales are loaded ahead, too, and with three stages Triton 3.6
# spills registers.
_QUANTIZED_STAGES = 2
_LOG2_E = math.log2(math.e)
# The largest exponent of a row that has seen no key.
LEAST = tl.constexpr(-1e30)


class LayerKv(NamedTuple):
    """One layer's keys and values: `blocks` [num_blocks, 2, num_kv_heads, block_tokens, head_dim], a view of
    the rank's KV whose heads are contiguous, and `in_host`, of the same shape and the same distances within a
    block, with the blocks from the id `first_host` on (None: no table of the step names one). Quantized ones
    have scales, float32 [num_blocks, 2, num_kv_heads, num_parts, block_tokens], in the same memory."""

    blocks: Tensor
    in_host: Tensor | None = None
    first_host: int = 0
    scales: Tensor | None = None
    host_scales: Tensor | None = None

    @staticmethod
    def of(layer: Tensor, head_dim: int, in_host: Tensor | None = None, first_host: int = 0) -> LayerKv:
        """Return a layer of a rank's KV, and of the blocks in host memory, as kernels take them."""
        if not is_quantized(layer):
            return LayerKv(layer, in_host, first_host)
        elements, scales = elements_and_scales(layer, head_dim)
        of_host = (None, None) if in_host is None else elements_and_scales(in_host, head_dim)
        return LayerKv(elements, of_host[0], first_host, scales, of_host[1])

    def arguments(self) -> tuple[Tensor, ...]:
        """Return the kernels' pointers: elements and those in host memory, scales and those in host memory.
        For what there is not, another stands, which is not read."""
        scales = self.blocks if self.scales is None else self.scales
        in_host = self.blocks if self.in_host is None else self.in_host
        host_scales = scales if self.host_scales is None else self.host_scales
        return raw_elements(self.blocks), raw_elements(in_host), scales, host_scales

    @property
    def elements(self) -> int:
        """The kernels' name of what the elements are."""
        return ELEMENTS.get(self.blocks.dtype, 0)


class PagedSequences(NamedTuple):
    """The places of a step's sequences, on the device, int32: sequence i has row `slots[i]` of the block
    tables `tables` [num_slots, max_blocks], and its `lengths[i]` new tokens begin at position `starts[i]`."""

    tables: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor


class Scoring(NamedTuple):
    """What scores s are: products of queries and keys times `scale` and, with a `softcap` that is not 0,
    softcap * tanh(s / softcap). Each of `sinks`, float32 [num_heads], is one more score of its query head,
    which has no value."""

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def exponent_scale(self) -> float:
        """The factor from what the kernels keep, products or their capped hyperbolic tangents, to an
        exponent of two."""
        return _LOG2_E * (self.softcap or self.scale)

    @property
    def cap_scale(self) -> float:
        """The factor from a product to the exponent of two in the hyperbolic tangent; 0: no cap."""
        return 2 * _LOG2_E * self.scale / self.softcap if self.softcap else 0.0


class Partials(NamedTuple):
    """The results that the pieces of rows that decode leave for the second pass, float32: `values` [num_rows,
    num_heads, num_pieces, head_dim], weighted by powers of two relative to the largest exponent of the piece,
    and `sums` [num_rows, num_heads, num_pieces, 2], that exponent and the sum of the weights. A piece has
    `piece_tokens` keys, or twice as many as often as a row needs."""

    values: Tensor
    sums: Tensor
    piece_tokens: int = PIECE_TOKENS

    @staticmethod
    def allocate(
        num_rows: int,
        num_heads: int,
        head_dim: int,
        max_context_tokens: int,
        device: torch.device,
        *,
        has_few: bool = True,
    ) -> Partials:
        """Allocate the partial results of rows that see at most `max_context_tokens` keys each. `has_few`:
        few rows have short pieces, by another kernel. Beside chunks they would gain nothing."""
        piece_tokens = PIECE_TOKENS
        while (
            has_few
            and piece_tokens > LEAST_PIECE_TOKENS
            and num_rows * PIECE_TOKENS <= FEW_ROWS * piece_tokens
        ):
            piece_tokens //= 2
        num_pieces = min(MAX_PIECES, -(-max_context_tokens // piece_tokens))
        shape = (num_rows, num_heads, num_pieces)
        return Partials(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty((*shape, 2), dtype=torch.float32, device=device),
            piece_tokens,
        )


class Tile(NamedTuple):
    """The division of a kernel's work: rows of queries and keys of a product, and Triton's options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def chunk_tile(dtype: torch.dtype, head_dim: int, card: Card) -> Tile:
    """Return the tile of `attend_chunks`. In float32, which the tensor cores do not multiply, a small one; of
    heads above 256 the smallest, for shared memory. Of heads above 128, 64 keys spill before Hopper."""
    if head_dim > 256:
        if dtype == torch.float32:
            return Tile(16, 16, 4, 2)
        return Tile(32, 32 if card.has_much_shared else 16, 8, 2)
    if dtype == torch.float32:
        return Tile(32, 32 if head_dim <= 128 or card.has_much_shared else 16, 8, 2)
    if head_dim <= 128:
        return Tile(128, 64, 8, 3 if card.has_much_shared else 2)
    return Tile(64, 64 if card.has_much_shared and card.capability >= HOPPER else 32, 8, 2)


def decode_tile(dtype: torch.dtype, head_dim: int, group: int, card: Card) -> Tile:
    """Return the tile of `attend_decodes`."""
    rows = padded(group)
    if head_dim > 256:
        return Tile(rows, 16 if dtype == torch.float32 or not card.has_much_shared else 32, 4, 2)
    if dtype == torch.float32:
        return Tile(rows, 32, 4, 2)
    if head_dim <= 128:
        return Tile(rows, 64, 4, 3)
    return Tile(rows, 64 if card.has_much_shared else 32, 4, 2)


# ------------------------------------------------------------------------------------ rows that decode


def attend_decodes(
    queries: Tensor,
    kv: LayerKv,
    sequences: PagedSequences,
    tasks: Tensor | None,
    window: int,
    scoring: Scoring,
    partials: Partials,
    out: Tensor,
) -> None:
    """Attend from one token each of some sequences. `queries` and `out` are [num_tokens, num_heads, head_dim]
    of the whole step, with contiguous rows. `tasks` int32 [num_decodes, 2] are the sequences that decode and
    their rows of `queries`; None: sequence i has row i. Window 0: none.

    The number of programs depends on the shapes alone."""
    _, num_heads, head_dim = queries.shape
    num_kv_heads, block_tokens = kv.blocks.shape[2:4]
    num_decodes, _, num_pieces, _ = partials.values.shape
    tile = decode_tile(queries.dtype, head_dim, num_heads // num_kv_heads, card_of(queries.device))
    pairs = num_decodes * num_kv_heads
    num_splits = min(num_pieces, max(MIN_SPLITS, -(-NUM_DECODE_PROGRAMS // pairs)))
    memory = kv.arguments()
    # Without tasks any tensor may stand in their place, as without sinks: it is not read.
    where = (sequences.starts, sequences.starts if tasks is None else tasks)
    _attend_pieces[(num_decodes, num_kv_heads, num_splits)](
        queries, *memory, sequences.tables, sequences.slots, *where, *partials[:2],
        queries.stride(0), memory[0].stride(0), memory[1].stride(0), sequences.tables.stride(0),
        kv.first_host, num_pieces, window, scoring.exponent_scale,
        HAS_TASKS=tasks is not None, HAS_HOST=kv.in_host is not None, GROUP=num_heads // num_kv_heads,
        KIND_STRIDE=kv.blocks.stride(1), HEAD_STRIDE=kv.blocks.stride(2), HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim), BLOCK_TOKENS=block_tokens,
        ROWS=tile.rows, KEYS=tile.keys, PIECE=partials.piece_tokens, MAX_PIECES=MAX_PIECES,
        HAS_WINDOW=window > 0, CAP_SCALE=scoring.cap_scale, ELEMENTS=kv.elements, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    reduce_pieces(where, tasks is not None, partials, window, scoring.sinks, out)


def reduce_pieces(
    where: tuple[Tensor, Tensor],
    has_tasks: bool,
    partials: Partials,
    window: int,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Combine the pieces of rows that decode, and their sinks, in `out` [num_tokens, num_heads, dim] of the
    whole step. `where` are the positions of sequences, and the tasks if there are any."""
    num_decodes, num_heads, num_pieces, dim = partials.values.shape
    _reduce_pieces[(num_decodes, num_heads)](
        *where, *partials[:2], partials.sums if sinks is None else sinks, out, out.stride(0), num_pieces,
        window, HAS_TASKS=has_tasks, HAS_SINKS=sinks is not None, HEAD_DIM=dim,
        PADDED_DIM=padded(dim), PIECE=partials.piece_tokens, MAX_PIECES=MAX_PIECES, HAS_WINDOW=window > 0,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "num_pieces"], do_not_specialize_on_alignment=INDICES)
def _attend_pieces(
    queries, kv, host, scales, host_scales, tables, slots, starts, tasks, values, sums,
    query_stride, block_stride, host_stride, table_stride, first_host, num_pieces, window, scale,
    HAS_TASKS: tl.constexpr, HAS_HOST: tl.constexpr, GROUP: tl.constexpr, KIND_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Attend from one token to every num_programs(2)-th of its pieces. Grid: (decodes, KV heads, any)."""
    decode = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence, row = decode_task(tasks, decode, HAS_TASKS)
    position = tl.load(starts + sequence)
    first, piece_tokens = row_pieces(position, window, PIECE, MAX_PIECES, HAS_WINDOW)
    first_piece = first // piece_tokens
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    # Rows after the group's repeat its last head, and are not stored.
    head = tl.minimum(tl.arange(0, ROWS), GROUP - 1)
    dim = tl.arange(0, PADDED_DIM)
    offsets = (kv_head * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(queries + row.to(tl.int64) * query_stride + offsets, mask=dim[None, :] < HEAD_DIM, other=0.0)
    positions = tl.zeros([ROWS], tl.int32) + position
    rows = tl.arange(0, ROWS)
    for piece in range(first_piece + tl.program_id(2), position // piece_tokens + 1, tl.num_programs(2)):
        largest, total, mixed = attend_range(
            q, positions, position, position, piece * piece_tokens, (piece + 1) * piece_tokens,
            kv, host, scales, host_scales, table, kv_head, block_stride, host_stride, first_host, window,
            scale, HAS_HOST, KIND_STRIDE, HEAD_STRIDE, HEAD_DIM, PADDED_DIM, BLOCK_TOKENS, ROWS, KEYS,
            HAS_WINDOW, CAP_SCALE, ELEMENTS,
        )  # fmt: skip
        heads = (decode.to(tl.int64) * tl.num_programs(1) + kv_head) * GROUP + rows
        at = heads * num_pieces + piece - first_piece
        is_head = rows < GROUP
        tl.store(sums + at * 2, largest, mask=is_head)
        tl.store(sums + at * 2 + 1, total, mask=is_head)
        is_stored = is_head[:, None] & (dim[None, :] < HEAD_DIM)
        tl.store(values + at[:, None] * HEAD_DIM + dim[None, :], mixed, mask=is_stored)


@triton.jit(do_not_specialize=["num_pieces"], do_not_specialize_on_alignment=INDICES)
def _reduce_pieces(
    starts, tasks, values, sums, sinks, out, out_stride, num_pieces, window,
    HAS_TASKS: tl.constexpr, HAS_SINKS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PIECE: tl.constexpr, MAX_PIECES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Combine the pieces of one row and its sink. Grid: (decodes, query heads)."""
    decode = tl.program_id(0)
    head = tl.program_id(1)
    sequence, row = decode_task(tasks, decode, HAS_TASKS)
    position = tl.load(starts + sequence)
    first, piece_tokens = row_pieces(position, window, PIECE, MAX_PIECES, HAS_WINDOW)
    piece = tl.arange(0, MAX_PIECES)
    is_piece = piece <= position // piece_tokens - first // piece_tokens
    at = (decode.to(tl.int64) * tl.num_programs(1) + head) * num_pieces + piece
    largest = tl.load(sums + at * 2, mask=is_piece, other=LEAST)
    most = tl.max(largest, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * SINK_SCALE
        most = tl.maximum(most, sink)
    weight = tl.exp2(largest - most)
    total = tl.sum(weight * tl.load(sums + at * 2 + 1, mask=is_piece, other=0.0), 0)
    if HAS_SINKS:
        total += tl.exp2(sink - most)
    dim = tl.arange(0, PADDED_DIM)
    is_loaded = is_piece[:, None] & (dim[None, :] < HEAD_DIM)
    mixed = tl.load(values + at[:, None] * HEAD_DIM + dim[None, :], mask=is_loaded, other=0.0)
    result = tl.sum(mixed * weight[:, None], 0) / total
    target = out + row.to(tl.int64) * out_stride + head * HEAD_DIM + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit
def decode_task(tasks, decode, HAS_TASKS: tl.constexpr):
    """Return sequence and row of a decode."""
    if HAS_TASKS:
        sequence = tl.load(tasks + decode * 2)
        row = tl.load(tasks + decode * 2 + 1)
    else:
        sequence = decode
        row = decode
    return sequence, row


@triton.jit
def row_pieces(
    position, window, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """Return the first key that a position sees, and the length of the pieces of its keys."""
    first = tl.full((), 0, tl.int32)
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    piece_tokens = tl.full((), PIECE, tl.int32)
    while position // piece_tokens - first // piece_tokens >= MAX_PIECES:
        piece_tokens = piece_tokens * 2
    return first, piece_tokens


# ---------------------------------------------------------------------------------- chunks of prompts


def attend_chunks(
    queries: Tensor,
    kv: LayerKv,
    sequences: PagedSequences,
    tasks: Tensor,
    window: int,
    scoring: Scoring,
    out: Tensor,
) -> None:
    """Attend from the new tokens of some sequences. `queries` and `out` are [num_tokens, num_heads, head_dim]
    of the whole step, with contiguous rows. `tasks` int32 [num_tiles, 3] are, for each tile of packed rows,
    the sequence, the row of `queries` with its first token, and which tile of the sequence it is. Window 0:
    none."""
    _, num_heads, head_dim = queries.shape
    num_kv_heads, block_tokens = kv.blocks.shape[2:4]
    tile = chunk_tile(queries.dtype, head_dim, card_of(queries.device))
    memory, sinks = kv.arguments(), scoring.sinks
    _attend_tiles[(len(tasks), num_kv_heads)](
        queries, *memory, *sequences, tasks, out if sinks is None else sinks, out,
        queries.stride(0), out.stride(0), memory[0].stride(0), memory[1].stride(0),
        sequences.tables.stride(0), kv.first_host, window, scoring.exponent_scale,
        HAS_HOST=kv.in_host is not None, HAS_SINKS=sinks is not None, GROUP=num_heads // num_kv_heads,
        KIND_STRIDE=kv.blocks.stride(1), HEAD_STRIDE=kv.blocks.stride(2),
        HEAD_DIM=head_dim, PADDED_DIM=padded(head_dim), BLOCK_TOKENS=block_tokens, ROWS=tile.rows,
        KEYS=tile.keys, HAS_WINDOW=window > 0, CAP_SCALE=scoring.cap_scale, ELEMENTS=kv.elements,
        num_warps=tile.num_warps, num_stages=_QUANTIZED_STAGES if kv.elements else tile.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=INDICES)
def _attend_tiles(
    queries, kv, host, scales, host_scales, tables, slots, starts, lengths, tasks, sinks, out,
    query_stride, out_stride, block_stride, host_stride, table_stride, first_host, window, scale,
    HAS_HOST: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, KIND_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of packed rows of a sequence. Grid: (tiles, KV heads)."""
    kv_head = tl.program_id(1)
    sequence, first_row, begin, start, num_rows = tile_place(
        starts, lengths, tasks, tl.program_id(0), True, GROUP, ROWS
    )
    q, token = load_queries(
        queries, query_stride, first_row, begin, num_rows, kv_head, GROUP, HEAD_DIM, PADDED_DIM, ROWS
    )
    oldest, newest = tile_positions(start, begin, num_rows, GROUP, ROWS)
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    largest, total, mixed = attend_range(
        q, start + token, oldest, newest, 0, newest + 1,
        kv, host, scales, host_scales, table, kv_head, block_stride, host_stride, first_host, window, scale,
        HAS_HOST, KIND_STRIDE, HEAD_STRIDE, HEAD_DIM, PADDED_DIM, BLOCK_TOKENS, ROWS, KEYS, HAS_WINDOW,
        CAP_SCALE, ELEMENTS,
    )  # fmt: skip
    rows = begin + tl.arange(0, ROWS)
    packed = tl.minimum(rows, num_rows - 1)
    store_rows(
        largest, total, mixed, sinks, out, out_stride, first_row, packed, rows < num_rows, kv_head, HAS_SINKS,
        GROUP, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip


# ----------------------------------------------------------------------------------- a range of keys


@triton.jit
def attend_range(
    q, positions, oldest, newest, begin, end,
    kv, host, scales, host_scales, table, kv_head, block_stride, host_stride, first_host, window, scale,
    HAS_HOST: tl.constexpr, KIND_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Attend from `q` [ROWS, PADDED_DIM] at `positions` [ROWS], from `oldest` to `newest`, to those of the
    keys [begin, end) that they see; `begin` is a multiple of KEYS. Returns of each row the largest exponent
    of two, the sum of powers relative to it, and the sum of the values weighted by these, [ROWS,
    PADDED_DIM]."""
    largest = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    kv += kv_head * HEAD_STRIDE
    host += kv_head * HEAD_STRIDE
    if ELEMENTS != 0:
        scales += kv_head * (HEAD_STRIDE // SCALE)
        host_scales += kv_head * (HEAD_STRIDE // SCALE)
    # The keys [first, last) are seen by some row, whole tiles from whole_begin to whole_end by every row.
    first = begin
    whole_begin = begin
    if HAS_WINDOW:
        first = tl.maximum(begin, oldest - window + 1)
        whole_begin = tl.maximum(begin, tl.cdiv(tl.maximum(newest - window + 1, 0), KEYS) * KEYS)
    last = tl.minimum(end, newest + 1)
    whole_begin = tl.minimum(whole_begin, last)
    whole_end = tl.maximum(whole_begin, tl.minimum(end, oldest + 1) // KEYS * KEYS)
    if HAS_WINDOW:
        largest, total, mixed = _attend_keys(
            q, positions, first // KEYS * KEYS, whole_begin, first, last, largest, total, mixed,
            kv, host, scales, host_scales, table, block_stride, host_stride, first_host, window, scale, True,
            HAS_HOST, KIND_STRIDE, HEAD_STRIDE, HEAD_DIM, PADDED_DIM, BLOCK_TOKENS, KEYS, HAS_WINDOW,
            CAP_SCALE, ELEMENTS,
        )  # fmt: skip
    largest, total, mixed = _attend_keys(
        q, positions, whole_begin, whole_end, first, last, largest, total, mixed,
        kv, host, scales, host_scales, table, block_stride, host_stride, first_host, window, scale, False,
        HAS_HOST, KIND_STRIDE, HEAD_STRIDE, HEAD_DIM, PADDED_DIM, BLOCK_TOKENS, KEYS, HAS_WINDOW, CAP_SCALE,
        ELEMENTS,
    )  # fmt: skip
    return _attend_keys(
        q, positions, whole_end, last, first, last, largest, total, mixed,
        kv, host, scales, host_scales, table, block_stride, host_stride, first_host, window, scale, True,
        HAS_HOST, KIND_STRIDE, HEAD_STRIDE, HEAD_DIM, PADDED_DIM, BLOCK_TOKENS, KEYS, HAS_WINDOW, CAP_SCALE,
        ELEMENTS,
    )  # fmt: skip


@triton.jit
def _attend_keys(
    q, positions, begin, end, first, last, largest, total, mixed,
    kv, host, scales, host_scales, table, block_stride, host_stride, first_host, window, scale,
    IS_BORDER: tl.constexpr, HAS_HOST: tl.constexpr, KIND_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of keys from `begin` to `end`. At a border only the keys [first, last) are read,
    and each row sees its own part of them.

    Scores are capped, and masked, before they are scaled to exponents, so that both kinds of tile do the same
    arithmetic. The blocks of
    a tile are looked up one tile ahead: of a look-up within the tile Triton's pipeliner would make a stage of
    its own, at the cost of a buffer of keys and values."""
    dim = tl.arange(0, PADDED_DIM)
    keys = begin + tl.arange(0, KEYS)
    blocks = tile_blocks(table, begin, keys, end, last, BLOCK_TOKENS, KEYS)
    for tile in range(begin, end, KEYS):
        keys = tile + tl.arange(0, KEYS)
        is_read = (keys >= first) & (keys < last)
        rows = kv + blocks.to(tl.int64) * block_stride
        if HAS_HOST:
            in_host = host + (blocks - first_host).to(tl.int64) * host_stride
            # A block begins at a multiple of 16 bytes, which a choice of two addresses hides.
            rows = tl.multiple_of(tl.where(blocks >= first_host, in_host, rows), 16)
        rows += keys % BLOCK_TOKENS * HEAD_DIM
        if ELEMENTS != 0:
            own_scales = scales + blocks.to(tl.int64) * (block_stride // SCALE)
            if HAS_HOST:
                in_host = host_scales + (blocks - first_host).to(tl.int64) * (host_stride // SCALE)
                own_scales = tl.where(blocks >= first_host, in_host, own_scales)
            own_scales += keys % BLOCK_TOKENS
        blocks = tile_blocks(table, tile + KEYS, keys + KEYS, end, last, BLOCK_TOKENS, KEYS)
        at = rows[:, None] + dim[None, :]
        k = widened(_load(at, dim, is_read, IS_BORDER, HEAD_DIM, PADDED_DIM), q.dtype, ELEMENTS)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if ELEMENTS != 0:
            scores *= load_scales(own_scales, is_read, IS_BORDER, ELEMENTS)[None, :]
        if CAP_SCALE != 0.0:  # tanh, whose error beside 1 is what matters: scores are only compared
            scores = 1.0 - 2.0 / (tl.exp2(scores * CAP_SCALE) + 1.0)
        if IS_BORDER:
            is_seen = (keys[None, :] <= positions[:, None]) & is_read[None, :]
            if HAS_WINDOW:
                is_seen &= keys[None, :] > positions[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))
        known = largest
        largest = tl.maximum(known, tl.max(scores, 1) * scale)
        weights = tl.exp2(tl.fma(scores, scale, -largest[:, None]))
        kept = tl.exp2(known - largest)
        total = tl.fma(total, kept, tl.sum(weights, 1))
        v = widened(_load(at + KIND_STRIDE, dim, is_read, IS_BORDER, HEAD_DIM, PADDED_DIM), q.dtype, ELEMENTS)
        if ELEMENTS != 0:
            of_values = load_scales(own_scales + KIND_STRIDE // SCALE, is_read, IS_BORDER, ELEMENTS)
            if q.dtype == tl.float16:  # whose exponents are too small for probabilities times scales
                v = (v.to(tl.float32) * of_values[:, None]).to(v.dtype)
            else:
                weights *= of_values[None, :]
        mixed = tl.dot(weights.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee")
    return largest, total, mixed


@triton.jit
def tile_blocks(table, tile, keys, end, last, BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr):
    """Return the block of a tile that lies in one, or the block of each key, of tiles before `end` and keys
    before `last`."""
    if BLOCK_TOKENS >= KEYS:
        return tl.load(table + tile // BLOCK_TOKENS, mask=tile < end, other=0)
    else:
        return tl.load(table + keys // BLOCK_TOKENS, mask=keys < last, other=0)


@triton.jit
def _load(
    at, dim, is_read, IS_BORDER: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr
):  # fmt: skip
    """Load rows of keys or values [KEYS, PADDED_DIM], of which those not read and the padding are zeros."""
    if IS_BORDER:
        return tl.load(at, mask=is_read[:, None] & (dim[None, :] < HEAD_DIM), other=0.0)
    elif HEAD_DIM != PADDED_DIM:
        return tl.load(at, mask=dim[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_scales(at, is_read, IS_BORDER: tl.constexpr, ELEMENTS: tl.constexpr):
    """Load the scales of a tile's keys or values [KEYS], times the unit of the elements; 0 of those not
    read."""
    if IS_BORDER:
        return tl.load(at, mask=is_read, other=0.0) * unit(ELEMENTS)
    else:
        return tl.load(at) * unit(ELEMENTS)


def padded(size: int) -> int:
    """Return a size of a product for `size` rows or columns: a power of two, and at least the 16 of a tensor
    core."""
    return max(16, 1 << (size - 1).bit_length())
