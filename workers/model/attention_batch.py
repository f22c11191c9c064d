"""One step's sequences as attention sees them: a flattened batch, and what to gather and to mask for it.

Letters: T tokens of the step, K key-value heads, D head size, B decoding sequences, S context tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
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


class HostReader(Protocol):
    """Reads the blocks that lie in host memory, for the attention of one step; `workers.model.host_kv`."""

    # Block ids from here on are of host memory; below they are of the device.
    first_id: int
    # Whether a layer's blocks are brought near, one after another; else they are read where they lie.
    is_staged: bool

    def layer(self, layer: int) -> Tensor:
        """[m, 2, K, block_tokens, D]: a layer of the step's staged blocks, or of all in host memory."""
        ...

    def done(self, layer: int) -> None:
        """The layer's attention has read its blocks, or will have before what the device is given next."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class HostSpots:
    """Where gathered blocks of `tables` [B, n] come from host memory: block `sources[i]` of a layer of the
    reader belongs at `positions[i]` of the table of sequence `sequences[i]`."""

    tables: Tensor
    sequences: Tensor
    positions: Tensor
    sources: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each. `rows` [B] are their rows in the batch, `kv_rows` [2 * B * K * n]
    the KV rows of layer 0 (keys, then values), `bias` [B * K, 1, S] float32 is 0 or -inf. Rows at `spots`
    mean nothing."""

    rows: Tensor
    kv_rows: Tensor
    bias: Tensor
    spots: HostSpots | None


@dataclasses.dataclass(frozen=True, slots=True)
class PagedDecodes:
    """All sequences with one new token each, for the kernel: `rows` [B] of the batch, block `tables` [B, n],
    and the keys [firsts, ends) that each sees, relative to its table's first block."""

    rows: Tensor
    tables: Tensor
    firsts: Tensor
    ends: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Several new tokens of one sequence: `rows` of the batch, `kv_rows` [2 * K * n] as above, the keys
    [first, end) of the gathered tokens, and `bias` [rows, end - first], None for a plain causal mask."""

    rows: slice
    kv_rows: Tensor
    first: int
    end: int
    bias: Tensor | None
    spots: HostSpots | None


class AttentionPlan(NamedTuple):
    """`paged` or `groups` cover the decoding sequences, `chunks` the others. `host_ids` are the blocks in
    host memory that they see; a reader stages them in this order."""

    paged: PagedDecodes | None
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    host_ids: tuple[int, ...]


class KvShape(NamedTuple):
    """The shape of a rank's KV, `[num_blocks, layers, 2, K, block_tokens, D]`, without `num_blocks`."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int


class Marks:
    """Takes the marks that a step's work makes as it proceeds; here nobody wants them."""

    def mark(self) -> None:
        """A piece of a layer is done or, on CUDA, queued."""

    def mark_layer(self) -> None:
        """A layer is done or, on CUDA, queued."""


_NO_MARKS = Marks()


@dataclasses.dataclass(slots=True)
class AttentionBatch:
    """One step's sequences, flattened. `positions`, `token_blocks` and `token_offsets` are [T]: where each
    token stands in its sequence, and where its KV goes. `partial_blocks` are blocks begun and not filled
    by this step: their rest is zeroed first, so that what lies there never reaches a softmax as NaN.
    `host` is there when tables name blocks in host memory. `marks` is called as the work proceeds."""

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
            host=host,
            marks=marks,
        )

    def plan(self, window: int, shape: KvShape, dtype: torch.dtype) -> AttentionPlan:
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
    """The spans, where a reader stages with the places of staged blocks in their tables, and the ids of all
    blocks in host memory that they see."""
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
    """Block tables [B, n] with any block of the device for those in host memory, and where these go."""
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
) -> PagedDecodes:
    tables, firsts, ends = _tables(batch, decodes, window, shape)
    return PagedDecodes(torch.tensor([row for _, row in decodes]), tables, firsts, ends)


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
    """Block ids [B, n] to rows of layer 0 of the KV seen as [.., block_tokens * D], ordered [2, B, K, n]."""
    num_rows = 2 * shape.num_kv_heads
    heads = torch.arange(num_rows, device=table.device).view(2, 1, shape.num_kv_heads, 1)
    return ((table * (shape.num_layers * num_rows))[None, :, None] + heads).reshape(-1)
