"""Attention in plain torch, on any device: the reference for every other backend.

Decoding sequences are gathered in groups of similar length; each chunk of a prompt goes through torch's fused
attention, unless scores are capped or there are sinks. Scores and probabilities are float32 whatever the
dtype of the model. In shapes, num_rows counts query tokens and group = num_heads / num_kv_heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    HostReader,
    KvShape,
    LayerAttention,
    LayerRead,
    Marks,
    SequenceSpan,
    StepInput,
    kv_shape,
    to_device,
)
from workers.model.attention.quantized_kv import Quantized, is_quantized, quantized_parts
from workers.model.attention.rotary import rope_table, rotate
from workers.model.sizes import ATTENTION_PIECE_FLOPS

# A group of decoding sequences is gathered into one padded tensor: the longest context of a group is at most
# twice the shortest, and a group has at most this many padded tokens.
_MAX_GROUP_TOKENS = 1 << 16
_MIN_PIECE_ROWS = 16
# Size of the keys of one head that a thread widens to float32 at a time. 2 MiB are as fast as products in
# bfloat16 from 1,000 keys on; widening all at once took three times as long.
_WIDENED_BYTES = 2 << 20


class TorchAttention(AttentionBackend):
    """Attention in plain torch."""

    name = "torch"
    can_stage = True
    is_deterministic = False

    def __init__(self, shape: AttentionShape, kv: Tensor) -> None:
        super().__init__(shape, kv)
        self._kv_shape = kv_shape(kv)
        self.rows = KvRows.of(kv)

    def over(self, shape: AttentionShape, kv: Tensor) -> TorchAttention:
        return TorchAttention(shape, kv)

    def plan(self, step: StepInput) -> TorchPlan:
        spans = _spans(step)
        window_to_view = {
            window: _plan_window(spans, step.host, window, self.rows, self.dtype)
            for window in dict.fromkeys(self.shape.windows)
        }
        plan = TorchPlan(self, step, window_to_view)
        if step.host is not None:
            step.host.begin(
                [
                    LayerRead(layer, window_to_view[window].host_ids)
                    for layer, window in enumerate(self.shape.windows)
                ]
            )
        return plan


class TorchPlan(AttentionPlan):
    """The attention of one step in plain torch."""

    def __init__(
        self, backend: TorchAttention, step: StepInput, window_to_view: dict[int, WindowView]
    ) -> None:
        super().__init__(step)
        self._kv = kv = backend.kv
        self._kv_shape = shape = kv_shape(kv)
        self._num_heads = backend.shape.num_heads
        self._scores = _Scores(backend.shape.scale(shape.head_dim), backend.shape.softcap)
        self._host = step.host
        self.window_to_view = window_to_view
        positions = step.positions()
        blocks = to_device(step.token_blocks(positions), kv.device).long()
        offsets = to_device(positions % step.block_tokens, kv.device)
        # Of layer 0, in rows of a head of a block, as [num_tokens, 2 * num_kv_heads].
        self._rows = blocks[:, None] * backend.rows.of_block + backend.rows.heads.view(1, -1)
        self._offsets = offsets[:, None]
        self._kv_rows = backend.rows
        self._dtype = backend.dtype
        on_device = to_device(positions, kv.device)
        self._rotations = [rope_table(on_device, it, backend.dtype) for it in backend.shape.rotations]
        self._clear_partial_blocks(step)

    def run(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        head_dim, num_kv = self._kv_shape.head_dim, self._kv_shape.num_kv_heads
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        table = self._rotations[layer.rotation]
        if not layer.has_own_kv:
            queries = heads if layer.q_norm is None else layer.q_norm.normed(heads)
            return self._attend(rotate(queries, *table), layer)
        queries, keys, values = torch.split(heads, [self._num_heads, num_kv, num_kv], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = layer.q_norm.normed(queries), layer.k_norm.normed(keys)
        queries, keys = rotate(queries, *table), rotate(keys, *table)
        self._write(layer.index, keys, values)
        return self._attend(queries, layer)

    def attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        return self._attend(queries.view(len(queries), -1, self._kv_shape.head_dim), layer)

    def _clear_partial_blocks(self, step: StepInput) -> None:
        """Zero the blocks that this step begins and does not fill, so that stale bytes never reach a softmax
        as NaN."""
        ends = step.starts + step.lengths
        last_begins = (ends - 1) // step.block_tokens * step.block_tokens
        is_partial = (step.starts <= last_begins) & (ends - last_begins < step.block_tokens)
        if is_partial.any():
            blocks = step.tables[step.slots, last_begins // step.block_tokens][is_partial]
            # Not the KV, whose values may be its keys: the memory that it is a view of.
            memory = self._kv_rows.memory
            memory = memory.view(torch.uint8) if is_quantized(memory) else memory
            by_block = memory.view(len(self._kv), -1)
            by_block.index_fill_(0, to_device(blocks, self._kv.device).long(), 0)

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [num_tokens, num_kv_heads, head_dim] to the tokens' blocks."""
        shape, memory = self._kv_shape, self._kv_rows.memory
        rows = self._rows + layer * self._kv_rows.of_layer
        both = torch.cat((keys, values), 1)
        if is_quantized(memory):
            held, written = quantized_parts(self._kv_rows.heads_of_blocks), Quantized.of(both, memory.dtype)
            held.elements[rows, self._offsets] = written.elements
            held.scales[rows, self._offsets] = written.scales
            return
        rows = (rows * shape.block_tokens + self._offsets).view(-1)
        memory.view(-1, shape.head_dim).index_copy_(0, rows, both.view(-1, shape.head_dim))

    def _attend(self, query: Tensor, layer: LayerAttention) -> Tensor:
        """Attend from `query` [num_tokens, num_heads, head_dim] to the KV already written."""
        view, host = self.window_to_view[layer.window], self._host
        seen = _LayerKv(self._kv_rows, layer.index, self._kv_shape, self._dtype, self._scores)
        if layer.sinks is not None:
            seen = seen._replace(sinks=layer.sinks.view(self._kv_shape.num_kv_heads, -1, 1))
        if host is None or not view.host_ids:
            return _attend(query, seen, view, self.marks)
        mixed = _attend(query, seen._replace(in_host=host.layer(layer.index)), view, self.marks)
        host.done(layer.index)
        return mixed


class KvRows(NamedTuple):
    """The KV, or a view of it, as rows of a head of a block: the `memory` [num_rows, block_tokens * head_dim]
    in which they lie, with scales if it has any, the number of rows from block to block and from layer to
    layer, the rows of the `heads` of a layer, [2, num_kv_heads], and the tokens of a row."""

    memory: Tensor
    of_block: int
    of_layer: int
    heads: Tensor
    block_tokens: int

    @property
    def heads_of_blocks(self) -> Tensor:
        """The memory as [num_rows, block_tokens, head_dim], the last with the bytes of scales."""
        return self.memory.view(len(self.memory), self.block_tokens, -1)

    @staticmethod
    def of(kv: Tensor) -> KvRows:
        """Return the rows of `kv` [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim]."""
        size = kv.shape[4] * kv.shape[5]
        assert kv.stride()[4:] == (kv.shape[5], 1), "tokens of a head are contiguous"
        assert not any(stride % size for stride in kv.stride()[:4]), "heads lie in places of their size"
        of_block, of_layer, of_kind, of_head = (stride // size for stride in kv.stride()[:4])
        num_rows = kv.shape[0] * of_block
        kinds = torch.arange(2, device=kv.device)[:, None] * of_kind
        heads = kinds + torch.arange(kv.shape[3], device=kv.device) * of_head
        return KvRows(kv.as_strided((num_rows, size), (size, 1)), of_block, of_layer, heads, kv.shape[4])


# --------------------------------------------------------------------------------- what a layer sees


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


def _spans(step: StepInput) -> list[SequenceSpan]:
    spans = []
    for slot, start, length in zip(step.slots, step.starts.tolist(), step.lengths.tolist(), strict=True):
        num_blocks = -(-(start + length) // step.block_tokens)
        spans.append(SequenceSpan(start, length, step.tables[slot, :num_blocks].tolist()))
    return spans


def _plan_window(
    spans: list[SequenceSpan], host: HostReader | None, window: int, rows: KvRows, dtype: torch.dtype
) -> WindowView:
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


# -------------------------------------------------------------------------------------- attention


class _Scores(NamedTuple):
    """What scores are of products of queries and keys: times `scale` and, with a `softcap` that is not 0,
    softcap * tanh(score / softcap)."""

    scale: float
    softcap: float

    def of(self, query: Tensor, transposed: Tensor, bias: Tensor) -> Tensor:
        """Return the scores of `query` [num_pairs, group, head_dim] with keys `transposed` [num_pairs,
        head_dim, num_keys], plus `bias` [num_pairs, 1, num_keys], all float32."""
        if not self.softcap:
            return torch.baddbmm(bias, query, transposed, alpha=self.scale)
        return self.capped(torch.bmm(query, transposed).mul_(self.scale)).add_(bias)

    def capped(self, scores: Tensor) -> Tensor:
        """Cap scaled scores in place, if they are to be."""
        return scores.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else scores


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the probabilities of `scores` [..., num_keys]; `sinks` [..., 1] are one more score of each row,
    whose probability is left out."""
    if sinks is None:
        return torch.softmax(scores, -1)
    both = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    return torch.softmax(both, -1)[..., :-1]


class _LayerKv(NamedTuple):
    """A layer of the KV: blocks on the device, and those in host memory (None if the step sees none); the
    dtype in which it is attended to; and its scores and `sinks` [num_kv_heads, group, 1], if it has any."""

    kv: KvRows
    number: int
    shape: KvShape
    dtype: torch.dtype
    scores: _Scores
    in_host: Tensor | None = None
    sinks: Tensor | None = None

    def gather(self, kv_rows: Tensor, spots: HostSpots | None, num_sequences: int) -> Tensor:
        """Gather the blocks of tables as [2 * num_sequences * num_kv_heads * num_blocks, block_tokens *
        head_dim]; `kv_rows` are of layer 0."""
        num_kv = self.shape.num_kv_heads
        gathered = self.kv.memory.index_select(0, kv_rows + self.number * self.kv.of_layer)
        if spots is not None and self.in_host is not None:
            by_block = gathered.view(2, num_sequences, num_kv, -1, gathered.shape[1])
            from_host = self.in_host.index_select(0, spots.sources).flatten(3)
            by_block.permute(1, 3, 0, 2, 4)[spots.sequences, spots.positions] = from_host
        if is_quantized(gathered):
            heads = gathered.view(len(gathered), self.shape.block_tokens, -1)
            return quantized_parts(heads).floats().to(self.dtype).flatten(1)
        return gathered


def _attend(query: Tensor, layer: _LayerKv, view: WindowView, marks: Marks) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    if len(view.groups) == 1 and not view.chunks:
        return _decode_group(query, layer, view.groups[0])
    output = query.new_empty(num_tokens, num_heads * head_dim)
    for group in view.groups:
        output[group.rows] = _decode_group(query[group.rows], layer, group)
        marks.mark()
    for chunk in view.chunks:
        output[chunk.rows] = _prefill_chunk(query[chunk.rows], layer, chunk, marks)
    return output


def _decode_group(query: Tensor, layer: _LayerKv, group: DecodeGroup) -> Tensor:
    """Attend from `query` [num_sequences, num_heads, head_dim]: the query heads of a key-value head are the
    rows of one product."""
    batch, num_heads, head_dim = query.shape
    num_kv = layer.shape.num_kv_heads
    pairs = batch * num_kv
    gathered = layer.gather(group.kv_rows, group.spots, batch)
    keys, values = gathered.view(2, pairs, -1, head_dim).unbind(0)
    grouped = query.reshape(pairs, num_heads // num_kv, head_dim)
    sinks = None if layer.sinks is None else layer.sinks.repeat(batch, 1, 1)
    mixed = _attend_all(grouped, keys, values, group.bias, layer.scores, sinks)
    return mixed.view(batch, num_heads * head_dim)


def _attend_all(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, of: _Scores, sinks: Tensor | None
) -> Tensor:
    """Attend from `query` [num_pairs, group, head_dim] to `keys` and `values` [num_pairs, num_keys, head_dim]
    with `bias` [num_pairs, 1, num_keys] and `sinks` [num_pairs, group, 1]; a pair is a sequence and a
    key-value head."""
    if query.dtype == torch.float32:
        return _softmax(of.of(query, keys.transpose(1, 2), bias), sinks).bmm(values)
    if query.device.type == "cuda":
        scores = torch.bmm(query, keys.transpose(1, 2), out_dtype=torch.float32).mul_(of.scale)
        scores = of.capped(scores).add_(bias)
        halves = split_in_halves(_softmax(scores, sinks), values.dtype)
        upper, lower = torch.bmm(halves, values, out_dtype=torch.float32).chunk(2, 1)
        return (upper + lower).to(query.dtype)
    # Other devices multiply in float32, a part at a time, so that the widened keys and values stay in cache.
    mixed = torch.empty_like(query)
    part_bytes = _WIDENED_BYTES * torch.get_num_threads()
    num_pairs = max(1, part_bytes // (keys[0].numel() * torch.float32.itemsize))
    for begin in range(0, len(query), num_pairs):
        part = slice(begin, begin + num_pairs)
        widened = keys[part].float().transpose(1, 2)
        scores = of.of(query[part].float(), widened, bias[part])
        of_part = None if sinks is None else sinks[part]
        mixed[part] = _softmax(scores, of_part).bmm(values[part].float())
    return mixed


def split_in_halves(probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Split float32 [num_pairs, group, num_keys] into [num_pairs, 2 * group, num_keys] of a narrow dtype:
    each value rounded, then the remainder.

    Both halves pass through one product with the values, which reads the values once and keeps twice the bits
    of a probability."""
    upper = probabilities.to(dtype)
    return torch.cat((upper, (probabilities - upper).to(dtype)), 1)


def _prefill_chunk(query: Tensor, layer: _LayerKv, chunk: Chunk, marks: Marks) -> Tensor:
    """Attend from `query` [num_rows, num_heads, head_dim] of one chunk. Key-value heads are the batch, so
    that expanding them to their query heads copies nothing."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv = layer.shape.num_kv_heads
    group = num_heads // num_kv
    gathered = layer.gather(chunk.kv_rows, chunk.spots, 1)
    seen = gathered.view(2, num_kv, 1, -1, head_dim)[:, :, :, chunk.first : chunk.end].expand(
        -1, -1, group, -1, -1
    )
    queries = query.view(num_tokens, num_kv, group, head_dim).permute(1, 2, 0, 3)
    sinks = None if layer.sinks is None else layer.sinks[..., None]
    pieces = _pieces(queries, seen.shape[3], chunk.bias is not None)
    attended = []
    for heads, rows in pieces:
        bias = None if chunk.bias is None else chunk.bias[rows]
        of_heads = None if sinks is None else sinks[heads]
        keys, values = seen[:, heads]
        attended.append(_attend_rows(queries[heads, :, rows], keys, values, bias, layer.scores, of_heads))
        marks.mark()
    mixed = attended[0]
    if len(pieces) > 1:
        mixed = torch.empty_like(queries)
        for (heads, rows), part in zip(pieces, attended, strict=True):
            mixed[heads, :, rows] = part
    return mixed.permute(2, 0, 1, 3).reshape(num_tokens, num_heads * head_dim)


def _attend_rows(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, of: _Scores, sinks: Tensor | None
) -> Tensor:
    """Attend from `queries` [num_kv_heads, group, num_rows, head_dim] to `keys` and `values` [num_kv_heads,
    group, num_keys, head_dim] with `bias` [num_rows, num_keys]; None: causally, from as many rows as keys.
    `sinks` are [num_kv_heads, group, 1, 1]."""
    if not of.softcap and sinks is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, is_causal=bias is None, scale=of.scale
        )
    scores = of.capped(torch.matmul(queries.float(), keys.float().transpose(2, 3)).mul_(of.scale))
    if bias is None:
        bias = torch.full(scores.shape[2:], float("-inf"), device=scores.device).triu_(1)
    return _softmax(scores.add_(bias), sinks).matmul(values.float()).to(queries.dtype)


def _pieces(queries: Tensor, num_keys: int, has_bias: bool) -> list[tuple[slice, slice]]:
    """Return the (key-value heads, rows) of `queries` [num_kv_heads, group, num_rows, head_dim] for each
    call: all of them or, on a CPU, where a call after a long prefix takes many seconds, parts of
    `ATTENTION_PIECE_FLOPS`.

    Whole heads are split off first, which changes no arithmetic. Without a bias the call masks by itself, and
    rows stay together: their context is no longer than the chunk.
    """
    num_kv, group, num_rows, head_dim = queries.shape
    row_flops = 4 * num_keys * group * head_dim
    every = slice(None)
    if queries.device.type != "cpu" or num_kv * num_rows * row_flops <= ATTENTION_PIECE_FLOPS:
        return [(every, every)]
    heads = [slice(head, head + 1) for head in range(num_kv)]
    if num_rows * row_flops <= ATTENTION_PIECE_FLOPS or not has_bias:
        return [(head, every) for head in heads]
    num_pieces = math.ceil(num_rows * row_flops / ATTENTION_PIECE_FLOPS)
    piece_rows = math.ceil(num_rows / num_pieces / _MIN_PIECE_ROWS) * _MIN_PIECE_ROWS
    rows = [slice(at, at + piece_rows) for at in range(0, num_rows, piece_rows)]
    return [(head, part) for head in heads for part in rows]
