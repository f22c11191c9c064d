"""The keys that layers with one window see in a step: which blocks are gathered, and which keys are masked.

Decoding sequences are gathered in groups of similar length, each chunk of a prompt by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.attention.interface import HostReader, SequenceSpan, StepInput
from workers.model.attention.kv_rows import KvRows

# A group of decoding sequences is gathered into one padded tensor: the longest context of a group is at most
# twice the shortest, and a group has at most this many padded tokens.
_MAX_GROUP_TOKENS = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class HostSpots:
    """Which of the gathered blocks come from host memory: block `sources[i]` of a layer of the reader belongs
    at `positions[i]` of the table of sequence `sequences[i]`."""

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


class WindowView(NamedTuple):
    """The keys that layers with one window gather and mask: `groups` for the decoding sequences, `chunks` for
    the others. `host_ids` are the blocks in host memory that they see, in the order in which a reader stages
    them."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    host_ids: tuple[int, ...]


class _Span(NamedTuple):
    """A sequence of the step from its row `row` on: the blocks of the keys [first, end) that it sees."""

    row: int
    start: int
    num_tokens: int
    first: int
    first_block: int
    block_ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def step_spans(step: StepInput) -> list[SequenceSpan]:
    """Return the sequences of a step with their blocks."""
    spans = []
    for slot, start, length in zip(step.slots, step.starts.tolist(), step.lengths.tolist(), strict=True):
        num_blocks = -(-(start + length) // step.block_tokens)
        spans.append(SequenceSpan(start, length, step.tables[slot, :num_blocks].tolist()))
    return spans


def plan_window(
    spans: list[SequenceSpan], host: HostReader | None, window: int, rows: KvRows, dtype: torch.dtype
) -> WindowView:
    """Return what layers with this window (0: none) see of the sequences; biases of chunks have `dtype`."""
    block_tokens = rows.block_tokens
    seen: list[_Span] = []
    row = 0
    for span in spans:
        first = max(0, span.start - window + 1) if window else 0
        first_block = first // block_tokens
        seen.append(_Span(row, span.start, span.num_tokens, first, first_block, span.block_ids[first_block:]))
        row += span.num_tokens
    host_ids: tuple[int, ...] = ()
    if host is not None:
        host_ids = tuple(sorted({it for span in seen for it in span.block_ids if it >= host.first_id}))
        if host.is_staged:
            places = {block_id: host.first_id + place for place, block_id in enumerate(host_ids)}
            seen = [span._replace(block_ids=[places.get(it, it) for it in span.block_ids]) for span in seen]
    first_id = host.first_id if host is not None else None
    groups = _split_by_length([span for span in seen if span.num_tokens == 1], block_tokens)
    return WindowView(
        tuple(_make_group(group, first_id, rows) for group in groups),
        tuple(_make_chunk(span, first_id, window, rows, dtype) for span in seen if span.num_tokens > 1),
        host_ids,
    )


def _host_spots(tables: Tensor, first_id: int | None) -> tuple[Tensor, HostSpots | None]:
    """Return block tables with any block of the device in place of those in host memory, and where these
    go."""
    if first_id is None:
        return tables, None
    in_host = tables >= first_id
    sequences, positions = in_host.nonzero(as_tuple=True)
    if not len(sequences):
        return tables, None
    sources = tables[sequences, positions] - first_id
    return tables.masked_fill(in_host, 0), HostSpots(sequences, positions, sources)


def _split_by_length(decodes: list[_Span], block_tokens: int) -> list[list[_Span]]:
    groups: list[list[_Span]] = []
    shortest = 0
    for decode in sorted(decodes, key=lambda span: len(span.block_ids)):
        length = len(decode.block_ids)
        fits = groups and (len(groups[-1]) + 1) * length * block_tokens <= _MAX_GROUP_TOKENS
        if fits and length <= 2 * shortest:
            groups[-1].append(decode)
        else:
            groups.append([decode])
            shortest = length
    return [sorted(group) for group in groups]


def _make_group(group: list[_Span], first_id: int | None, rows: KvRows) -> DecodeGroup:
    device, block_tokens = rows.heads.device, rows.block_tokens
    most = max(len(span.block_ids) for span in group)
    # Tables are padded with their last block.
    padded = [list(span.block_ids) + [span.block_ids[-1]] * (most - len(span.block_ids)) for span in group]
    begins = [span.first_block * block_tokens for span in group]
    firsts = [span.first - begin for span, begin in zip(group, begins, strict=True)]
    ends = [span.end - begin for span, begin in zip(group, begins, strict=True)]
    key = torch.arange(most * block_tokens)
    hidden = (key >= torch.tensor(ends)[:, None]) | (key < torch.tensor(firsts)[:, None])
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    tables, spots = _host_spots(torch.tensor(padded, device=device), first_id)
    return DecodeGroup(
        rows=torch.tensor([span.row for span in group], device=device),
        kv_rows=_kv_rows(tables, rows),
        bias=bias.to(device).repeat_interleave(rows.heads.shape[1], 0)[:, None],
        spots=spots,
    )


def _make_chunk(span: _Span, first_id: int | None, window: int, rows: KvRows, dtype: torch.dtype) -> Chunk:
    device = rows.heads.device
    begin = span.first_block * rows.block_tokens
    bias = None
    if span.start > 0 or 0 < window < span.end:
        query = torch.arange(span.start, span.end, device=device)[:, None]
        key = torch.arange(span.first, span.end, device=device)
        hidden = key > query
        if window:
            hidden |= key <= query - window
        bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
        bias.masked_fill_(hidden, float("-inf"))
    tables, spots = _host_spots(torch.tensor([list(span.block_ids)], device=device), first_id)
    return Chunk(
        rows=slice(span.row, span.row + span.num_tokens),
        kv_rows=_kv_rows(tables, rows),
        first=span.first - begin,
        end=span.end - begin,
        bias=bias,
        spots=spots,
    )


def _kv_rows(table: Tensor, rows: KvRows) -> Tensor:
    """Map block ids [num_sequences, num_blocks] to rows of layer 0, in the order [2, num_sequences,
    num_kv_heads, num_blocks]."""
    return ((table * rows.of_block)[None, :, None] + rows.heads[:, None, :, None]).reshape(-1)
