"""One step's sequences as attention sees them: a flattened batch, and what to gather and to mask for it.

num_tokens counts the tokens of the step, num_sequences its decoding sequences.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model import native

# A group of decoding sequences is gathered into one padded tensor: the longest context of a group is at most
# twice the shortest, and a group has at most this many padded tokens.
_MAX_GROUP_TOKENS = 1 << 16


class SequenceSpan(NamedTuple):
    """`num_tokens` new tokens of one sequence from position `start`. Its block table `block_ids` covers at
    least start + num_tokens tokens; further entries are ignored."""

    start: int
    num_tokens: int
    block_ids: Sequence[int]


class HostReader(ABC):
    """Reads the blocks that lie in host memory, for the attention of one step after another.

    Block ids from `first_id` on denote blocks in host memory; smaller ids denote blocks of the device.
    """

    # Whether a layer's blocks are staged on the device, one layer after another; else they are read in place.
    is_staged = True

    def __init__(self, first_id: int) -> None:
        self.first_id = first_id

    @abstractmethod
    def begin(self, batch: AttentionBatch) -> None:
        """Begin a step, before its first layer. The plan's copies are done, or queued on the device's
        stream."""

    @abstractmethod
    def layer(self, layer: int) -> Tensor:
        """Return a layer of the step's staged blocks, or of all blocks in host memory,
        [num_blocks, 2, num_kv_heads, block_tokens, head_dim]."""

    @abstractmethod
    def done(self, layer: int) -> None:
        """Release a layer's blocks: its attention has read them, or will have before later work of the
        device."""

    @abstractmethod
    def close(self) -> None:
        """Release what the reader holds."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostSpots:
    """Which of the gathered blocks of `tables` [num_sequences, num_blocks] come from host memory: block
    `sources[i]` of a layer of the reader belongs at `positions[i]` of the table of sequence
    `sequences[i]`."""

    tables: Tensor
    sequences: Tensor
    positions: Tensor
    sources: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each: their `rows` [num_sequences] in the batch, the `kv_rows` [2 *
    num_sequences * num_kv_heads * num_blocks] of layer 0 (keys, then values), and a float32 `bias` of 0 or
    -inf, [num_sequences * num_kv_heads, 1, num_context_tokens]. Rows at `spots` are placeholders."""

    rows: Tensor
    kv_rows: Tensor
    bias: Tensor
    spots: HostSpots | None


@dataclasses.dataclass(frozen=True, slots=True)
class PagedDecodes:
    """All sequences with one new token each, for the kernel: their `rows` [num_sequences] of the batch, their
    block `tables` [num_sequences, num_blocks], and the keys [firsts, ends) that each sees, relative to its
    table's first block."""

    rows: Tensor
    tables: Tensor
    firsts: Tensor
    ends: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Several new tokens of one sequence: its `rows` of the batch, `kv_rows` [2 * num_kv_heads * num_blocks]
    as in `DecodeGroup`, the keys [first, end) of the gathered tokens, and `bias` [num_rows, end - first],
    None for a plain causal mask."""

    rows: slice
    kv_rows: Tensor
    first: int
    end: int
    bias: Tensor | None
    spots: HostSpots | None


class AttentionPlan(NamedTuple):
    """What to gather and mask: `paged` or `groups` for the decoding sequences, `chunks` for the others.
    `host_ids` are the blocks in host memory that they see, in the order in which a reader stages them."""

    paged: PagedDecodes | None
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    host_ids: tuple[int, ...]


class KvShape(NamedTuple):
    """The shape of a rank's KV, [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim], without
    `num_blocks`."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int


class Marks:
    """Takes the marks of a step's progress. This base ignores them."""

    def mark(self) -> None:
        """Mark a piece of a layer as done or, on CUDA, queued."""

    def mark_layer(self) -> None:
        """Mark a layer as done or, on CUDA, queued."""


_NO_MARKS = Marks()


@dataclasses.dataclass(slots=True)
class AttentionBatch:
    """One step's sequences, flattened.

    `positions`, `token_blocks` and `token_offsets`, [num_tokens], say where each token stands in its sequence
    and where its KV goes. `partial_blocks` are blocks that this step begins and does not fill: they are
    zeroed first, so that stale bytes never reach a softmax as NaN. `host` is set if tables name blocks in
    host memory. `marks` takes the progress of the work."""

    spans: tuple[SequenceSpan, ...]
    block_tokens: int
    positions: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    partial_blocks: Tensor | None
    host: HostReader | None = None
    marks: Marks = _NO_MARKS
    _plans: dict[tuple[int, KvShape, torch.dtype], AttentionPlan] = dataclasses.field(default_factory=dict)
    _slots: dict[KvShape, Tensor] = dataclasses.field(default_factory=dict)

    @staticmethod
    def build(
        spans: Sequence[SequenceSpan],
        block_tokens: int,
        device: torch.device,
        host: HostReader | None = None,
        marks: Marks = _NO_MARKS,
    ) -> AttentionBatch:
        """Build the batch of `spans`, whose order its rows follow."""
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
            host=host,
            marks=marks,
        )

    def plan(self, window: int, shape: KvShape, dtype: torch.dtype) -> AttentionPlan:
        """Return what to gather and mask for layers with this window (0: none). Made once a step."""
        key = (window, shape, dtype)
        if key not in self._plans:
            self._plans[key] = _make_plan(self, window, shape, dtype)
        return self._plans[key]

    def slots(self, shape: KvShape) -> Tensor:
        """Return the rows of the step's keys and values in layer 0 of the KV seen as [.., head_dim], as
        [num_tokens, 2 * num_kv_heads]."""
        if shape not in self._slots:
            num_rows = 2 * shape.num_kv_heads
            heads = torch.arange(num_rows, device=self.positions.device)
            rows = (self.token_blocks * (shape.num_layers * num_rows))[:, None] + heads
            self._slots[shape] = rows * shape.block_tokens + self.token_offsets[:, None]
        return self._slots[shape]


def _make_plan(batch: AttentionBatch, window: int, shape: KvShape, dtype: torch.dtype) -> AttentionPlan:
    host_ids: tuple[int, ...] = ()
    if batch.host is not None:
        spans, host_ids = _with_host(batch.spans, batch.host, window, shape)
        batch = dataclasses.replace(batch, spans=spans)
    chunks: list[Chunk] = []
    decodes: list[tuple[int, int]] = []
    row = 0
    for number, span in enumerate(batch.spans):
        if span.num_tokens == 1:
            decodes.append((number, row))
        else:
            chunks.append(_make_chunk(batch, span, row, window, shape, dtype))
        row += span.num_tokens
    if decodes and native.serves(batch.positions.device, dtype):
        return AttentionPlan(_make_paged(batch, decodes, window, shape), (), tuple(chunks), host_ids)
    groups = _split_by_length(batch, decodes, window, shape)
    made = [_make_group(batch, sorted(group), window, shape) for group in groups]
    return AttentionPlan(None, tuple(made), tuple(chunks), host_ids)


def _with_host(
    spans: tuple[SequenceSpan, ...], host: HostReader, window: int, shape: KvShape
) -> tuple[tuple[SequenceSpan, ...], tuple[int, ...]]:
    """Return the spans, with the places of staged blocks in their tables if the reader stages, and the ids of
    all blocks in host memory that they see."""
    seen: set[int] = set()
    for span in spans:
        first = _first_block(span, window, shape)
        seen.update(span.block_ids[first : first + _num_blocks(span, window, shape)])
    host_ids = tuple(sorted(block_id for block_id in seen if block_id >= host.first_id))
    if host.is_staged:
        # A block outside every window keeps its id: nothing looks at it.
        places = {block_id: host.first_id + place for place, block_id in enumerate(host_ids)}
        spans = tuple(
            span._replace(block_ids=[places.get(block_id, block_id) for block_id in span.block_ids])
            for span in spans
        )
    return spans, host_ids


def _host_spots(tables: Tensor, host: HostReader | None) -> tuple[Tensor, HostSpots | None]:
    """Return block tables with any block of the device in place of those in host memory, and where these
    go."""
    if host is None:
        return tables, None
    in_host = tables >= host.first_id
    sequences, positions = in_host.nonzero(as_tuple=True)
    if not len(sequences):
        return tables, None
    sources = tables[sequences, positions] - host.first_id
    spots = HostSpots(tables, sequences, positions, sources)
    return tables.masked_fill(in_host, 0), spots


def _first_block(span: SequenceSpan, window: int, shape: KvShape) -> int:
    """Return the index of the block of the first key that the span's first token sees."""
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
) -> PagedDecodes:
    tables, firsts, ends = _tables(batch, decodes, window, shape)
    return PagedDecodes(torch.tensor([row for _, row in decodes]), tables, firsts, ends)


def _tables(
    batch: AttentionBatch, decodes: list[tuple[int, int]], window: int, shape: KvShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return block tables [num_sequences, num_blocks] padded with their last block, and the keys [first, end)
    that each sequence sees, relative to its table's first block."""
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
    batch: AttentionBatch, decodes: list[tuple[int, int]], window: int, shape: KvShape
) -> DecodeGroup:
    tables, firsts, ends = _tables(batch, decodes, window, shape)
    device = batch.positions.device
    key = torch.arange(tables.shape[1] * shape.block_tokens, device=device)
    hidden = (key >= ends[:, None]) | (key < firsts[:, None])
    bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
    tables, spots = _host_spots(tables, batch.host)
    return DecodeGroup(
        rows=torch.tensor([row for _, row in decodes], device=device),
        kv_rows=_kv_rows(tables, shape),
        bias=bias.repeat_interleave(shape.num_kv_heads, 0)[:, None],
        spots=spots,
    )


def _make_chunk(
    batch: AttentionBatch, span: SequenceSpan, row: int, window: int, shape: KvShape, dtype: torch.dtype
) -> Chunk:
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
    tables, spots = _host_spots(torch.tensor([list(table)], device=device), batch.host)
    return Chunk(
        rows=slice(row, row + span.num_tokens),
        kv_rows=_kv_rows(tables, shape),
        first=first - begin,
        end=end - begin,
        bias=bias,
        spots=spots,
    )


def _kv_rows(table: Tensor, shape: KvShape) -> Tensor:
    """Map block ids [num_sequences, num_blocks] to rows of layer 0 of the KV seen as [.., block_tokens *
    head_dim], in the order [2, num_sequences, num_kv_heads, num_blocks]."""
    num_rows = 2 * shape.num_kv_heads
    heads = torch.arange(num_rows, device=table.device).view(2, 1, shape.num_kv_heads, 1)
    return ((table * (shape.num_layers * num_rows))[None, :, None] + heads).reshape(-1)
