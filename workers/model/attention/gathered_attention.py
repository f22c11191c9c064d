"""Attention in plain torch to KV that is gathered from its blocks.

Decoding sequences of one group are attended to in one product; each chunk of a prompt goes through torch's
fused attention, unless scores are capped or there are sinks. In shapes, num_rows counts query tokens and
group = num_heads / num_kv_heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.attention.interface import KvShape, Marks, PartialResults
from workers.model.attention.kv_rows import KvRows
from workers.model.attention.quantized_kv import is_quantized, widened
from workers.model.attention.window_views import Chunk, DecodeGroup, HostSpots, WindowView
from workers.model.sizes import ATTENTION_PIECE_FLOPS

_MIN_PIECE_ROWS = 16
# Size of the keys of one head that a thread widens to float32 at a time. 2 MiB are as fast as products in
# bfloat16 from 1,000 keys on; widening all at once took three times as long.
_WIDENED_BYTES = 2 << 20


class Scores(NamedTuple):
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


class GatheredLayer(NamedTuple):
    """A layer of the KV: blocks on the device, and those in host memory (None if the step sees none); the
    dtype in which it is attended to; its scores; the sizes of the parts of a quantized vector that have a
    scale each; and `sinks` [num_kv_heads, group, 1], if the layer has any."""

    kv: KvRows
    number: int
    shape: KvShape
    dtype: torch.dtype
    scores: Scores
    parts: tuple[int, ...]
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
            return widened(heads, self.parts).to(self.dtype).flatten(1)
        return gathered


def attend(query: Tensor, layer: GatheredLayer, view: WindowView, marks: Marks) -> Tensor:
    """Attend from `query` [num_tokens, num_heads, head_dim] to the keys in view; return [num_tokens,
    num_heads * head_dim]. Each part of the work is marked when it is done."""
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


def _decode_group(query: Tensor, layer: GatheredLayer, group: DecodeGroup) -> Tensor:
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


def attend_parts(query: Tensor, layer: GatheredLayer, view: WindowView, marks: Marks) -> PartialResults:
    """Attend from `query` [num_tokens, num_heads, head_dim] to the keys in view; layers have no sinks."""
    assert layer.sinks is None
    num_rows, num_heads, head_dim = query.shape
    num_kv = layer.shape.num_kv_heads
    mixed = query.new_empty(query.shape, dtype=torch.float32)
    log_sums = mixed.new_empty(num_rows, num_heads)
    for group in view.groups:
        gathered = layer.gather(group.kv_rows, group.spots, len(group.rows))
        keys, values = gathered.view(2, len(group.rows) * num_kv, -1, head_dim).unbind(0)
        grouped = query[group.rows].reshape(len(keys), num_heads // num_kv, head_dim).float()
        sums = grouped.new_empty(grouped.shape[:2])
        for part in _widened_parts(keys):
            scores = layer.scores.of(grouped[part], keys[part].float().transpose(1, 2), group.bias[part])
            grouped[part] = torch.softmax(scores, -1).bmm(values[part].float())
            sums[part] = torch.logsumexp(scores, -1)
        mixed[group.rows], log_sums[group.rows] = (
            grouped.view(-1, num_heads, head_dim),
            sums.view(-1, num_heads),
        )
        marks.mark()
    for chunk in view.chunks:
        mixed[chunk.rows], log_sums[chunk.rows] = _chunk_parts(query[chunk.rows].float(), layer, chunk)
        marks.mark()
    return PartialResults(mixed, log_sums)


def _chunk_parts(query: Tensor, layer: GatheredLayer, chunk: Chunk) -> PartialResults:
    """Attend from `query` [num_rows, num_heads, head_dim] of one chunk, float32."""
    num_rows, num_heads, head_dim = query.shape
    num_kv = layer.shape.num_kv_heads
    gathered = layer.gather(chunk.kv_rows, chunk.spots, 1).view(2, num_kv, -1, head_dim)
    keys, values = gathered[:, :, chunk.first : chunk.end].float().unbind(0)
    # The query heads of a key-value head, each with all rows.
    grouped = query.view(num_rows, num_kv, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    bias = chunk.bias
    if bias is None:
        bias = query.new_full((num_rows, num_rows), float("-inf")).triu_(1)
    scores = layer.scores.of(grouped, keys.transpose(1, 2), bias.float().repeat(num_heads // num_kv, 1)[None])
    mixed = torch.softmax(scores, -1).bmm(values).view(num_kv, -1, num_rows, head_dim)
    log_sums = torch.logsumexp(scores, -1).view(num_heads, num_rows)
    return PartialResults(mixed.permute(2, 0, 1, 3).reshape(query.shape), log_sums.T)


def _attend_all(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, of: Scores, sinks: Tensor | None
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
    for part in _widened_parts(keys):
        widened = keys[part].float().transpose(1, 2)
        scores = of.of(query[part].float(), widened, bias[part])
        of_part = None if sinks is None else sinks[part]
        mixed[part] = _softmax(scores, of_part).bmm(values[part].float())
    return mixed


def _widened_parts(keys: Tensor) -> Iterator[slice]:
    """Divide pairs, of `keys` [num_pairs, num_keys, head_dim], so that those of a part stay in cache."""
    part_bytes = _WIDENED_BYTES * torch.get_num_threads()
    num_pairs = max(1, part_bytes // (keys[0].numel() * torch.float32.itemsize))
    for begin in range(0, len(keys), num_pairs):
        yield slice(begin, begin + num_pairs)


def split_in_halves(probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Split float32 [num_pairs, group, num_keys] into [num_pairs, 2 * group, num_keys] of a narrow dtype:
    each value rounded, then the remainder.

    Both halves pass through one product with the values, which reads the values once and keeps twice the bits
    of a probability."""
    upper = probabilities.to(dtype)
    return torch.cat((upper, (probabilities - upper).to(dtype)), 1)


def _prefill_chunk(query: Tensor, layer: GatheredLayer, chunk: Chunk, marks: Marks) -> Tensor:
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
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, of: Scores, sinks: Tensor | None
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
