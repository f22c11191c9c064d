"""Attention over paged KV for a flattened batch of prefill chunks and decoding sequences.

On a CPU with a compiler, decoding sequences are attended where their blocks lie (`workers.model.native`);
everything else is plain torch on any device. On CUDA it has not been run, and a paged Triton kernel belongs
there behind `paged_attention`. Letters: T tokens of the step, H query heads, K key-value heads,
G = H / K, D head size, B decoding sequences, S context tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import native

# A group of decoding sequences is gathered into one padded tensor: the longest context of a group is at
# most twice the shortest, and a group has at most this many padded tokens.
_MAX_GROUP_TOKENS = 1 << 16


class SequenceSpan(NamedTuple):
    """`num_tokens` new tokens of one sequence from position `start`. `block_ids` is its block table, long
    enough for start + num_tokens tokens; more entries are ignored."""

    start: int
    num_tokens: int
    block_ids: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one new token each. `rows` [B] are their rows in the batch, `kv_rows` [2 * B * K * n]
    the KV rows of layer 0 (keys, then values), `bias` [B * K, 1, S] is 0 or -inf."""

    rows: Tensor
    kv_rows: Tensor
    bias: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _PagedDecodes:
    """All sequences with one new token each, for the kernel: `rows` [B] of the batch, block `tables` [B, n],
    and the keys [firsts, ends) that each sees, relative to its table's first block."""

    rows: Tensor
    tables: Tensor
    firsts: Tensor
    ends: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """Several new tokens of one sequence: `rows` of the batch, `kv_rows` [2 * K * n] as above, the keys
    [first, end) of the gathered tokens, and `bias` [rows, end - first], None for a plain causal mask."""

    rows: slice
    kv_rows: Tensor
    first: int
    end: int
    bias: Tensor | None


class _Plan(NamedTuple):
    """`paged` or `groups` cover the decoding sequences, `chunks` the others."""

    paged: _PagedDecodes | None
    groups: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]


class KvShape(NamedTuple):
    """The shape of a rank's KV, `[num_blocks, layers, 2, K, block_tokens, D]`, without `num_blocks`."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int


@dataclasses.dataclass(slots=True)
class AttentionBatch:
    """One step's sequences, flattened. `positions`, `token_blocks` and `token_offsets` are [T]: where each
    token stands in its sequence, and where its KV goes. `partial_blocks` are blocks begun and not filled
    by this step: their rest is zeroed first, so that what lies there never reaches a softmax as NaN."""

    spans: tuple[SequenceSpan, ...]
    block_tokens: int
    positions: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    partial_blocks: Tensor | None
    _plans: dict[tuple[int, KvShape, torch.dtype], _Plan] = dataclasses.field(default_factory=dict)
    _slots: dict[KvShape, Tensor] = dataclasses.field(default_factory=dict)

    @staticmethod
    def build(spans: Sequence[SequenceSpan], block_tokens: int, device: torch.device) -> AttentionBatch:
        """Rows of the batch follow the order of `spans`."""
        assert spans, "an empty step has no batch"
        positions: list[int] = []
        blocks: list[int] = []
        partial: list[int] = []
        for span in spans:
            end = span.start + span.num_tokens
            assert span.num_tokens > 0, span
            assert len(span.block_ids) * block_tokens >= end, span
            positions.extend(range(span.start, end))
            blocks.extend(span.block_ids[position // block_tokens] for position in range(span.start, end))
            last_begin = (end - 1) // block_tokens * block_tokens
            if span.start <= last_begin and end - last_begin < block_tokens:
                partial.append(span.block_ids[(end - 1) // block_tokens])
        positions_tensor = torch.tensor(positions, device=device)
        return AttentionBatch(
            spans=tuple(spans),
            block_tokens=block_tokens,
            positions=positions_tensor,
            token_blocks=torch.tensor(blocks, device=device),
            token_offsets=positions_tensor % block_tokens,
            partial_blocks=torch.tensor(partial, device=device) if partial else None,
        )

    def plan(self, window: int, shape: KvShape, dtype: torch.dtype) -> _Plan:
        """What to gather and mask for layers with this window (0: none); made once a step."""
        key = (window, shape, dtype)
        if key not in self._plans:
            self._plans[key] = _make_plan(self, window, shape, dtype)
        return self._plans[key]

    def slots(self, shape: KvShape) -> Tensor:
        """[T, 2K]: the rows of the step's keys and values in layer 0 of the KV seen as [.., D]."""
        if shape not in self._slots:
            num_rows = 2 * shape.num_kv_heads
            heads = torch.arange(num_rows, device=self.positions.device)
            rows = (self.token_blocks * (shape.num_layers * num_rows))[:, None] + heads
            self._slots[shape] = rows * shape.block_tokens + self.token_offsets[:, None]
        return self._slots[shape]


def clear_partial_blocks(kv: Tensor, batch: AttentionBatch) -> None:
    """Zero the blocks that this step begins and does not fill. Once a step, before the first layer."""
    if batch.partial_blocks is not None:
        kv.index_fill_(0, batch.partial_blocks, 0)


def write_kv(kv: Tensor, layer: int, keys_values: Tensor, rows: slice, batch: AttentionBatch) -> None:
    """Put a layer's keys and values [t, 2K, D] of these rows of the batch into the tokens' blocks."""
    shape = _kv_shape(kv)
    offset = layer * 2 * shape.num_kv_heads * shape.block_tokens
    slots = batch.slots(shape)[rows].view(-1) + offset
    kv.view(-1, shape.head_dim).index_copy_(0, slots, keys_values.reshape(-1, shape.head_dim))


def paged_attention(query: Tensor, kv: Tensor, layer: int, window: int, batch: AttentionBatch) -> Tensor:
    """Causal attention of `query` [T, H, D] over the KV already written; returns [T, H * D].

    A token at position i sees the keys j with j <= i and, with a window, i - window < j.
    """
    shape = _kv_shape(kv)
    plan = batch.plan(window, shape, query.dtype)
    blocks = kv.view(-1, shape.block_tokens * shape.head_dim)
    first_row = layer * 2 * shape.num_kv_heads
    num_tokens, num_heads, head_dim = query.shape
    if plan.paged is not None and not plan.chunks:
        return _decode_paged(query, kv, layer, plan.paged)
    if len(plan.groups) == 1 and not plan.chunks:
        return _decode_group(query, blocks, first_row, plan.groups[0], shape)
    output = query.new_empty(num_tokens, num_heads * head_dim)
    if plan.paged is not None:
        output[plan.paged.rows] = _decode_paged(query[plan.paged.rows], kv, layer, plan.paged)
    for group in plan.groups:
        output[group.rows] = _decode_group(query[group.rows], blocks, first_row, group, shape)
    for chunk in plan.chunks:
        output[chunk.rows] = _prefill_chunk(query[chunk.rows], blocks, first_row, chunk, shape)
    return output


def _decode_paged(query: Tensor, kv: Tensor, layer: int, decodes: _PagedDecodes) -> Tensor:
    """`query` [B, H, D] to [B, H * D]."""
    kernels = native.load()
    assert kernels is not None
    return kernels.decode_attention(
        query.contiguous(), kv, layer, decodes.tables, decodes.firsts, decodes.ends
    )


def _kv_shape(kv: Tensor) -> KvShape:
    _, num_layers, _, num_kv_heads, block_tokens, head_dim = kv.shape
    return KvShape(num_layers, num_kv_heads, block_tokens, head_dim)


def _decode_group(
    query: Tensor, blocks: Tensor, first_row: int, group: _DecodeGroup, shape: KvShape
) -> Tensor:
    """`query` [B, H, D] to [B, H * D]: the G query heads of a key-value head are the rows of one product."""
    batch, num_heads, head_dim = query.shape
    pairs = batch * shape.num_kv_heads
    gathered = blocks.index_select(0, group.kv_rows + first_row)
    keys, values = gathered.view(2, pairs, -1, head_dim).unbind(0)
    grouped = query.reshape(pairs, num_heads // shape.num_kv_heads, head_dim)
    scores = torch.baddbmm(group.bias, grouped, keys.transpose(1, 2), alpha=head_dim**-0.5)
    return torch.softmax(scores, dim=-1).bmm(values).view(batch, num_heads * head_dim)


def _prefill_chunk(query: Tensor, blocks: Tensor, first_row: int, chunk: _Chunk, shape: KvShape) -> Tensor:
    """`query` [t, H, D] to [t, H * D]: key-value heads are the batch, so that expanding them to G query
    heads each copies nothing."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv = shape.num_kv_heads
    group = num_heads // num_kv
    gathered = blocks.index_select(0, chunk.kv_rows + first_row).view(2, num_kv, 1, -1, head_dim)
    seen = gathered[:, :, :, chunk.first : chunk.end].expand(-1, -1, group, -1, -1)
    mixed = F.scaled_dot_product_attention(
        query.view(num_tokens, num_kv, group, head_dim).permute(1, 2, 0, 3),
        seen[0],
        seen[1],
        attn_mask=chunk.bias,
        is_causal=chunk.bias is None,
    )
    return mixed.permute(2, 0, 1, 3).reshape(num_tokens, num_heads * head_dim)


def _make_plan(batch: AttentionBatch, window: int, shape: KvShape, dtype: torch.dtype) -> _Plan:
    chunks: list[_Chunk] = []
    decodes: list[tuple[int, int]] = []
    row = 0
    for number, span in enumerate(batch.spans):
        if span.num_tokens == 1:
            decodes.append((number, row))
        else:
            chunks.append(_make_chunk(batch, span, row, window, shape, dtype))
        row += span.num_tokens
    if decodes and native.serves(batch.positions.device, dtype):
        return _Plan(_make_paged(batch, decodes, window, shape), (), tuple(chunks))
    groups = _split_by_length(batch, decodes, window, shape)
    made = [_make_group(batch, sorted(group), window, shape, dtype) for group in groups]
    return _Plan(None, tuple(made), tuple(chunks))


def _first_block(span: SequenceSpan, window: int, shape: KvShape) -> int:
    """The block of the first key that the span's first token sees."""
    return max(0, span.start - window + 1) // shape.block_tokens if window else 0


def _num_blocks(span: SequenceSpan, window: int, shape: KvShape) -> int:
    end = -(-(span.start + span.num_tokens) // shape.block_tokens)
    return end - _first_block(span, window, shape)


def _split_by_length(
    batch: AttentionBatch, decodes: list[tuple[int, int]], window: int, shape: KvShape
) -> list[list[tuple[int, int]]]:
    def length(decode: tuple[int, int]) -> int:
        return _num_blocks(batch.spans[decode[0]], window, shape)

    groups: list[list[tuple[int, int]]] = []
    shortest = 0
    for decode in sorted(decodes, key=length):
        fits = groups and (len(groups[-1]) + 1) * length(decode) * shape.block_tokens <= _MAX_GROUP_TOKENS
        if fits and length(decode) <= 2 * shortest:
            groups[-1].append(decode)
        else:
            groups.append([decode])
            shortest = length(decode)
    return groups


def _make_paged(
    batch: AttentionBatch, decodes: list[tuple[int, int]], window: int, shape: KvShape
) -> _PagedDecodes:
    tables, firsts, ends = _tables(batch, decodes, window, shape)
    return _PagedDecodes(torch.tensor([row for _, row in decodes]), tables, firsts, ends)


def _tables(
    batch: AttentionBatch, decodes: list[tuple[int, int]], window: int, shape: KvShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables [B, n] padded with their last block, and the keys [first, end) [B] that each sequence
    sees, relative to its table's first block."""
    spans = [batch.spans[number] for number, _ in decodes]
    most = max(_num_blocks(span, window, shape) for span in spans)
    tables, firsts, ends = [], [], []
    for span in spans:
        first_block = _first_block(span, window, shape)
        table = list(span.block_ids[first_block : first_block + _num_blocks(span, window, shape)])
        tables.append(table + table[-1:] * (most - len(table)))
        begin = first_block * shape.block_tokens
        firsts.append(max(0, span.start - window + 1) - begin if window else 0)
        ends.append(span.start + 1 - begin)
    device = batch.positions.device
    return (
        torch.tensor(tables, device=device),
        torch.tensor(firsts, device=device),
        torch.tensor(ends, device=device),
    )


def _make_group(
    batch: AttentionBatch, decodes: list[tuple[int, int]], window: int, shape: KvShape, dtype: torch.dtype
) -> _DecodeGroup:
    tables, firsts, ends = _tables(batch, decodes, window, shape)
    device = batch.positions.device
    key = torch.arange(tables.shape[1] * shape.block_tokens, device=device)
    hidden = (key >= ends[:, None]) | (key < firsts[:, None])
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return _DecodeGroup(
        rows=torch.tensor([row for _, row in decodes], device=device),
        kv_rows=_kv_rows(tables, shape),
        bias=bias.repeat_interleave(shape.num_kv_heads, 0)[:, None],
    )


def _make_chunk(
    batch: AttentionBatch, span: SequenceSpan, row: int, window: int, shape: KvShape, dtype: torch.dtype
) -> _Chunk:
    device = batch.positions.device
    end = span.start + span.num_tokens
    first_block = _first_block(span, window, shape)
    begin = first_block * shape.block_tokens
    first = max(0, span.start - window + 1) if window else 0
    bias = None
    if span.start > 0 or (window and window < end):
        query = torch.arange(span.start, end, device=device)[:, None]
        key = torch.arange(first, end, device=device)
        hidden = key > query
        if window:
            hidden |= key <= query - window
        bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    table = span.block_ids[first_block : first_block + _num_blocks(span, window, shape)]
    return _Chunk(
        rows=slice(row, row + span.num_tokens),
        kv_rows=_kv_rows(torch.tensor([list(table)], device=device), shape),
        first=first - begin,
        end=end - begin,
        bias=bias,
    )


def _kv_rows(table: Tensor, shape: KvShape) -> Tensor:
    """Block ids [B, n] to rows of layer 0 of the KV seen as [.., block_tokens * D], ordered [2, B, K, n]."""
    num_rows = 2 * shape.num_kv_heads
    heads = torch.arange(num_rows, device=table.device).view(2, 1, shape.num_kv_heads, 1)
    return ((table * (shape.num_layers * num_rows))[None, :, None] + heads).reshape(-1)
