"""Attention over paged latents in Triton: of rows that decode, and of chunks that attend to latents.

All heads share a row of the KV, [rank + rope]: the whole row is a key, its first `rank` columns are the
value. Where rows have 8 bits, each of both parts has a scale. A program reads a tile of rows once for both.
Blocks are read where they lie; scores, probabilities, their sums and mixed latents are float32, and the order
of a row's sums depends on its position alone, as in `workers.model.cuda.attention`.

The heads of a token are rows of the same products ("packed"). The sizes are for 16 bits at rank 512 and rope
64: 32 rows of queries and a tile of 32 keys take 36 + 36 KiB of shared memory, which every card has, and the
32 x 512 accumulators 64 registers a thread with 8 warps. 64 rows would spill. A token of 16 heads takes 16
rows, by 64 keys. Not yet validated on a card."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.cuda.attention import (
    MAX_PIECES,
    MIN_SPLITS,
    NUM_DECODE_PROGRAMS,
    LayerKv,
    PagedSequences,
    Partials,
    Scoring,
    Tile,
    decode_task,
    load_scales,
    padded,
    reduce_pieces,
    row_pieces,
    tile_blocks,
)
from workers.model.cuda.kv_elements import SCALE, widened

# The arguments of which a program reads few items, as in `workers.model.cuda.attention`.
_INDICES = ["tables", "slots", "starts", "lengths", "tasks"]
_LEAST = tl.constexpr(-1e30)


def latent_tile(dtype: torch.dtype, num_rows: int) -> Tile:
    """Return the tile for so many packed rows of a sequence."""
    rows = min(padded(num_rows), 16 if dtype == torch.float32 else 32)
    if dtype == torch.float32:
        return Tile(rows, 16, 4, 2)
    return Tile(rows, 64 if rows <= 16 else 32, 8, 2)


def decode_latents(
    queries: Tensor,
    kv: LayerKv,
    sequences: PagedSequences,
    tasks: Tensor | None,
    scoring: Scoring,
    partials: Partials,
    out: Tensor,
) -> None:
    """Attend from one token each of some sequences. `queries` are [num_tokens, num_heads, rank + rope], `out`
    [num_tokens, num_heads, rank], of the whole step; the other arguments are those of `attend_decodes`."""
    _, num_heads, width = queries.shape
    num_decodes, _, num_pieces, rank = partials.values.shape
    tile = latent_tile(queries.dtype, num_heads)
    num_tiles = triton.cdiv(num_heads, tile.rows)
    num_splits = min(num_pieces, max(MIN_SPLITS, -(-NUM_DECODE_PROGRAMS // (num_decodes * num_tiles))))
    in_host = kv.blocks if kv.in_host is None else kv.in_host
    where = (sequences.starts, sequences.starts if tasks is None else tasks)
    _latent_pieces[(num_decodes, num_tiles, num_splits)](
        queries, *kv.arguments(), sequences.tables, sequences.slots, *where, *partials[:2],
        queries.stride(0), kv.blocks.stride(0), in_host.stride(0), sequences.tables.stride(0), kv.first_host,
        num_pieces, scoring.exponent_scale,
        HAS_TASKS=tasks is not None, HAS_HOST=kv.in_host is not None, NUM_HEADS=num_heads, WIDTH=width,
        RANK=rank, PADDED_RANK=padded(rank), PADDED_ROPE=padded(width - rank),
        BLOCK_TOKENS=kv.blocks.shape[3], ROWS=tile.rows, KEYS=tile.keys, PIECE=partials.piece_tokens,
        MAX_PIECES=MAX_PIECES, ELEMENTS=kv.elements, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    reduce_pieces(where, tasks is not None, partials, 0, None, out)


def chunk_latents(
    queries: Tensor,
    kv: LayerKv,
    sequences: PagedSequences,
    tasks: Tensor,
    scoring: Scoring,
    out: Tensor,
) -> None:
    """Attend from the new tokens of some sequences, as `attend_chunks` does; shapes are as above. Tiles have
    the rows of `latent_tile` for any number of packed rows."""
    _, num_heads, width = queries.shape
    rank = out.shape[2]
    tile = latent_tile(queries.dtype, 64)
    in_host = kv.blocks if kv.in_host is None else kv.in_host
    _latent_tiles[(len(tasks),)](
        queries, *kv.arguments(), *sequences, tasks, out,
        queries.stride(0), out.stride(0), kv.blocks.stride(0), in_host.stride(0), sequences.tables.stride(0),
        kv.first_host, scoring.exponent_scale,
        HAS_HOST=kv.in_host is not None, NUM_HEADS=num_heads, WIDTH=width, RANK=rank,
        PADDED_RANK=padded(rank), PADDED_ROPE=padded(width - rank), BLOCK_TOKENS=kv.blocks.shape[3],
        ROWS=tile.rows, KEYS=tile.keys, ELEMENTS=kv.elements, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "num_pieces"], do_not_specialize_on_alignment=_INDICES)
def _latent_pieces(
    queries, kv, host, scales, host_scales, tables, slots, starts, tasks, values, sums,
    query_stride, block_stride, host_stride, table_stride, first_host, num_pieces, scale,
    HAS_TASKS: tl.constexpr, HAS_HOST: tl.constexpr, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, PADDED_ROPE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Attend from some heads of one token to every num_programs(2)-th of its pieces. Grid: (decodes, tiles of
    heads, any)."""
    decode = tl.program_id(0)
    sequence, row = decode_task(tasks, decode, HAS_TASKS)
    position = tl.load(starts + sequence)
    _, piece_tokens = row_pieces(position, 0, PIECE, MAX_PIECES, False)
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Rows after the last head repeat it, and are not stored.
    at = queries + row.to(tl.int64) * query_stride + tl.minimum(heads, NUM_HEADS - 1)[:, None] * WIDTH
    q, q_rope = _load_row(at, True, False, RANK, PADDED_RANK, WIDTH, PADDED_ROPE)
    positions = tl.zeros([ROWS], tl.int32) + position
    dim = tl.arange(0, PADDED_RANK)
    for piece in range(tl.program_id(2), position // piece_tokens + 1, tl.num_programs(2)):
        largest, total, mixed = _attend_range(
            q, q_rope, positions, position, position, piece * piece_tokens, (piece + 1) * piece_tokens,
            kv, host, scales, host_scales, table, block_stride, host_stride, first_host, scale,
            HAS_HOST, WIDTH, RANK, PADDED_RANK, PADDED_ROPE, BLOCK_TOKENS, ROWS, KEYS, ELEMENTS,
        )  # fmt: skip
        to = (decode.to(tl.int64) * NUM_HEADS + heads) * num_pieces + piece
        is_head = heads < NUM_HEADS
        tl.store(sums + to * 2, largest, mask=is_head)
        tl.store(sums + to * 2 + 1, total, mask=is_head)
        tl.store(
            values + to[:, None] * RANK + dim[None, :], mixed, mask=is_head[:, None] & (dim[None, :] < RANK)
        )


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_INDICES)
def _latent_tiles(
    queries, kv, host, scales, host_scales, tables, slots, starts, lengths, tasks, out,
    query_stride, out_stride, block_stride, host_stride, table_stride, first_host, scale,
    HAS_HOST: tl.constexpr, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr, PADDED_ROPE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of packed rows of a sequence. Grid: (tiles,)."""
    task = tl.program_id(0) * 3
    sequence = tl.load(tasks + task)
    first_row = tl.load(tasks + task + 1).to(tl.int64)
    begin = tl.load(tasks + task + 2) * ROWS
    start = tl.load(starts + sequence)
    num_rows = tl.load(lengths + sequence) * NUM_HEADS
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    # Rows after the last repeat it, and are not stored.
    rows = begin + tl.arange(0, ROWS)
    packed = tl.minimum(rows, num_rows - 1)
    token = packed // NUM_HEADS
    head = packed % NUM_HEADS
    at = queries + ((first_row + token) * query_stride + head * WIDTH)[:, None]
    q, q_rope = _load_row(at, True, False, RANK, PADDED_RANK, WIDTH, PADDED_ROPE)
    oldest = start + begin // NUM_HEADS
    newest = start + (tl.minimum(begin + ROWS, num_rows) - 1) // NUM_HEADS
    _, total, mixed = _attend_range(
        q, q_rope, start + token, oldest, newest, 0, newest + 1,
        kv, host, scales, host_scales, table, block_stride, host_stride, first_host, scale,
        HAS_HOST, WIDTH, RANK, PADDED_RANK, PADDED_ROPE, BLOCK_TOKENS, ROWS, KEYS, ELEMENTS,
    )  # fmt: skip
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    dim = tl.arange(0, PADDED_RANK)
    to = out + ((first_row + token) * out_stride + head * RANK)[:, None] + dim[None, :]
    tl.store(to, result, mask=(rows < num_rows)[:, None] & (dim[None, :] < RANK))


@triton.jit
def _attend_range(
    q, q_rope, positions, oldest, newest, begin, end,
    kv, host, scales, host_scales, table, block_stride, host_stride, first_host, scale,
    HAS_HOST: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Attend from queries `q` [ROWS, PADDED_RANK] and `q_rope` [ROWS, PADDED_ROPE] at `positions` [ROWS],
    from `oldest` to `newest`, to those of the keys [begin, end) that they see; `begin` is a multiple of KEYS.
    Returns what `workers.model.cuda.attention` does for such a range."""
    largest = tl.full([ROWS], _LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_RANK], tl.float32)
    last = tl.minimum(end, newest + 1)
    # Tiles before this one are seen whole by every row.
    whole_end = tl.maximum(begin, tl.minimum(end, oldest + 1) // KEYS * KEYS)
    largest, total, mixed = _attend_keys(
        q, q_rope, positions, begin, whole_end, last, largest, total, mixed,
        kv, host, scales, host_scales, table, block_stride, host_stride, first_host, scale, False,
        HAS_HOST, WIDTH, RANK, PADDED_RANK, PADDED_ROPE, BLOCK_TOKENS, KEYS, ELEMENTS,
    )  # fmt: skip
    return _attend_keys(
        q, q_rope, positions, whole_end, last, last, largest, total, mixed,
        kv, host, scales, host_scales, table, block_stride, host_stride, first_host, scale, True,
        HAS_HOST, WIDTH, RANK, PADDED_RANK, PADDED_ROPE, BLOCK_TOKENS, KEYS, ELEMENTS,
    )  # fmt: skip


@triton.jit
def _attend_keys(
    q, q_rope, positions, begin, end, last, largest, total, mixed,
    kv, host, scales, host_scales, table, block_stride, host_stride, first_host, scale,
    IS_BORDER: tl.constexpr, HAS_HOST: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr, PADDED_ROPE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of keys from `begin` to `end`. At a border only keys before `last` are read, and
    each row sees its own part of them. The blocks of a tile are looked up one tile ahead."""
    keys = begin + tl.arange(0, KEYS)
    blocks = tile_blocks(table, begin, keys, end, last, BLOCK_TOKENS, KEYS)
    for tile in range(begin, end, KEYS):
        keys = tile + tl.arange(0, KEYS)
        is_read = keys < last
        rows = kv + blocks.to(tl.int64) * block_stride
        if HAS_HOST:
            in_host = host + (blocks - first_host).to(tl.int64) * host_stride
            # A block begins at a multiple of 16 bytes, which a choice of two addresses hides.
            rows = tl.multiple_of(tl.where(blocks >= first_host, in_host, rows), 16)
        rows += keys % BLOCK_TOKENS * WIDTH
        if ELEMENTS != 0:
            own_scales = scales + blocks.to(tl.int64) * (block_stride // SCALE)
            if HAS_HOST:
                in_host = host_scales + (blocks - first_host).to(tl.int64) * (host_stride // SCALE)
                own_scales = tl.where(blocks >= first_host, in_host, own_scales)
            own_scales += keys % BLOCK_TOKENS
        blocks = tile_blocks(table, tile + KEYS, keys + KEYS, end, last, BLOCK_TOKENS, KEYS)
        latents, rope = _load_row(
            rows[:, None], is_read[:, None], IS_BORDER, RANK, PADDED_RANK, WIDTH, PADDED_ROPE
        )
        latents, rope = widened(latents, q.dtype, ELEMENTS), widened(rope, q.dtype, ELEMENTS)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        if ELEMENTS != 0:
            of_latents = load_scales(own_scales, is_read, IS_BORDER, ELEMENTS)
            of_rope = load_scales(own_scales + BLOCK_TOKENS, is_read, IS_BORDER, ELEMENTS)
            rotated = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
            scores = scores * of_latents[None, :] + rotated * of_rope[None, :]
        else:
            scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        if IS_BORDER:
            is_seen = (keys[None, :] <= positions[:, None]) & is_read[None, :]
            scores = tl.where(is_seen, scores, float("-inf"))
        known = largest
        largest = tl.maximum(known, tl.max(scores, 1) * scale)
        weights = tl.exp2(tl.fma(scores, scale, -largest[:, None]))
        kept = tl.exp2(known - largest)
        total = tl.fma(total, kept, tl.sum(weights, 1))
        if ELEMENTS != 0:
            if q.dtype == tl.float16:  # whose exponents are too small for probabilities times scales
                latents = (latents.to(tl.float32) * of_latents[:, None]).to(latents.dtype)
            else:
                weights *= of_latents[None, :]
        mixed = tl.dot(weights.to(latents.dtype), latents, mixed * kept[:, None], input_precision="ieee")
    return largest, total, mixed


@triton.jit
def _load_row(
    at, is_read, IS_BORDER: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, WIDTH: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
):  # fmt: skip
    """Load the latents [rows, PADDED_RANK] and the rotated parts [rows, PADDED_ROPE] of the rows that begin
    `at` [rows, 1]; padding, and at a border what is not read, are zeros."""
    dim = tl.arange(0, PADDED_RANK)[None, :]
    rope = tl.arange(0, PADDED_ROPE)[None, :]
    if IS_BORDER:
        latents = tl.load(at + dim, mask=is_read & (dim < RANK), other=0.0)
        rotated = tl.load(at + RANK + rope, mask=is_read & (rope < WIDTH - RANK), other=0.0)
    else:
        latents = _load_columns(at + dim, dim, RANK, PADDED_RANK)
        rotated = _load_columns(at + RANK + rope, rope, WIDTH - RANK, PADDED_ROPE)
    return latents, rotated


@triton.jit
def _load_columns(at, dim, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load columns, of which the padding is zeros."""
    if SIZE != PADDED:
        return tl.load(at, mask=dim < SIZE, other=0.0)
    else:
        return tl.load(at)
