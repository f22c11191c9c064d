"""Attention over paged KV for a flattened batch of prefill chunks and decoding sequences.

On a CPU with a compiler, decoding sequences attend to their blocks in place (`workers.model.native`);
everything else is plain torch on any device. Scores and probabilities are float32 whatever the dtype of the
model, so that paths differ only in the rounding of their results. Not yet validated on CUDA, where a paged
Triton kernel belongs behind `paged_attention`. In shapes, num_rows counts query tokens and group = num_heads
/ num_kv_heads."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import native
from workers.model.attention_batch import (
    AttentionBatch,
    AttentionPlan,
    Chunk,
    DecodeGroup,
    HostSpots,
    KvShape,
    Marks,
    PagedDecodes,
)
from workers.model.sizes import ATTENTION_PIECE_FLOPS

_MIN_PIECE_ROWS = 16

# Size of the keys of one head that a thread widens to float32 at a time. 2 MiB are as fast as products in
# bfloat16 from 1,000 keys on; widening all at once took three times as long.
_WIDENED_BYTES = 2 << 20


def clear_partial_blocks(kv: Tensor, batch: AttentionBatch) -> None:
    """Zero the blocks that this step begins and does not fill. Called once a step, before the first layer."""
    if batch.partial_blocks is not None:
        kv.index_fill_(0, batch.partial_blocks, 0)


def write_kv(kv: Tensor, layer: int, keys_values: Tensor, rows: slice, batch: AttentionBatch) -> None:
    """Write a layer's keys and values [num_rows, 2 * num_kv_heads, head_dim] of these rows to the tokens'
    blocks."""
    shape = kv_shape(kv)
    offset = layer * 2 * shape.num_kv_heads * shape.block_tokens
    slots = batch.slots(shape)[rows].view(-1) + offset
    kv.view(-1, shape.head_dim).index_copy_(0, slots, keys_values.reshape(-1, shape.head_dim))


def paged_attention(query: Tensor, kv: Tensor, layer: int, window: int, batch: AttentionBatch) -> Tensor:
    """Attend causally from `query` [num_tokens, num_heads, head_dim] to the KV already written. Returns
    [num_tokens, num_heads * head_dim].

    A token at position i sees the keys j with j <= i and, with a window, i - window < j.
    """
    shape = kv_shape(kv)
    plan = batch.plan(window, shape, query.dtype)
    host = batch.host
    if host is None or not plan.host_ids:
        return _attend(query, _LayerKv(kv, layer, shape, None, 0), plan, batch.marks)
    mixed = _attend(query, _LayerKv(kv, layer, shape, host.layer(layer), host.first_id), plan, batch.marks)
    host.done(layer)
    return mixed


def _attend(query: Tensor, layer: _LayerKv, plan: AttentionPlan, marks: Marks) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    if plan.paged is not None and not plan.chunks:
        return _decode_paged(query, layer, plan.paged)
    if len(plan.groups) == 1 and not plan.chunks:
        return _decode_group(query, layer, plan.groups[0])
    output = query.new_empty(num_tokens, num_heads * head_dim)
    if plan.paged is not None:
        output[plan.paged.rows] = _decode_paged(query[plan.paged.rows], layer, plan.paged)
    for group in plan.groups:
        output[group.rows] = _decode_group(query[group.rows], layer, group)
        marks.mark()
    for chunk in plan.chunks:
        output[chunk.rows] = _prefill_chunk(query[chunk.rows], layer, chunk, marks)
    return output


class _LayerKv(NamedTuple):
    """A layer of the KV: blocks on the device, and those in host memory (`in_host`, None if the step sees
    none), with the ids from `first_host_id` on."""

    kv: Tensor
    number: int
    shape: KvShape
    in_host: Tensor | None
    first_host_id: int

    def gather(self, kv_rows: Tensor, spots: HostSpots | None) -> Tensor:
        """Gather the blocks of tables as [2 * num_sequences * num_kv_heads * num_blocks, block_tokens *
        head_dim]; `kv_rows` are of layer 0."""
        num_kv = self.shape.num_kv_heads
        if spots is not None and self.in_host is not None and native.serves(self.kv.device, self.kv.dtype):
            kernels = native.load()
            assert kernels is not None
            return kernels.gather_blocks(self.kv, self.number, spots.tables, self.in_host, self.first_host_id)
        rows = self.kv.view(-1, self.shape.block_tokens * self.shape.head_dim)
        gathered = rows.index_select(0, kv_rows + self.number * 2 * num_kv)
        if spots is not None and self.in_host is not None:
            by_block = gathered.view(2, len(spots.tables), num_kv, -1, gathered.shape[1])
            from_host = self.in_host.index_select(0, spots.sources).flatten(3)
            by_block.permute(1, 3, 0, 2, 4)[spots.sequences, spots.positions] = from_host
        return gathered


def _decode_paged(query: Tensor, layer: _LayerKv, decodes: PagedDecodes) -> Tensor:
    """Attend from `query` [num_sequences, num_heads, head_dim] with the kernel."""
    kernels = native.load()
    assert kernels is not None
    tables, firsts, ends = decodes.tables, decodes.firsts, decodes.ends
    kv, number, _, in_host, first_host_id = layer
    return kernels.decode_attention(
        query.contiguous(), kv, number, tables, firsts, ends, in_host, first_host_id
    )


def kv_shape(kv: Tensor) -> KvShape:
    """Return the shape of a rank's KV."""
    _, num_layers, _, num_kv_heads, block_tokens, head_dim = kv.shape
    return KvShape(num_layers, num_kv_heads, block_tokens, head_dim)


def _decode_group(query: Tensor, layer: _LayerKv, group: DecodeGroup) -> Tensor:
    """Attend from `query` [num_sequences, num_heads, head_dim]: the query heads of a key-value head are the
    rows of one product."""
    batch, num_heads, head_dim = query.shape
    num_kv = layer.shape.num_kv_heads
    pairs = batch * num_kv
    gathered = layer.gather(group.kv_rows, group.spots)
    keys, values = gathered.view(2, pairs, -1, head_dim).unbind(0)
    grouped = query.reshape(pairs, num_heads // num_kv, head_dim)
    return _attend_all(grouped, keys, values, group.bias, head_dim**-0.5).view(batch, num_heads * head_dim)


def _attend_all(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attend from `query` [num_pairs, group, head_dim] to `keys` and `values` [num_pairs, num_keys, head_dim]
    with `bias` [num_pairs, 1, num_keys]; a pair is a sequence and a key-value head."""
    if query.dtype == torch.float32:
        return torch.softmax(torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=scale), -1).bmm(values)
    if query.device.type == "cuda":
        scores = torch.bmm(query, keys.transpose(1, 2), out_dtype=torch.float32).mul_(scale).add_(bias)
        halves = split_in_halves(torch.softmax(scores, -1), values.dtype)
        upper, lower = torch.bmm(halves, values, out_dtype=torch.float32).chunk(2, 1)
        return (upper + lower).to(query.dtype)
    # Other devices multiply in float32, a part at a time, so that the widened keys and values stay in cache.
    mixed = torch.empty_like(query)
    part_bytes = _WIDENED_BYTES * torch.get_num_threads()
    num_pairs = max(1, part_bytes // (keys[0].numel() * torch.float32.itemsize))
    for begin in range(0, len(query), num_pairs):
        part = slice(begin, begin + num_pairs)
        widened = keys[part].float().transpose(1, 2)
        scores = torch.baddbmm(bias[part], query[part].float(), widened, alpha=scale)
        mixed[part] = torch.softmax(scores, -1).bmm(values[part].float())
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
    gathered = layer.gather(chunk.kv_rows, chunk.spots)
    seen = gathered.view(2, num_kv, 1, -1, head_dim)[:, :, :, chunk.first : chunk.end].expand(
        -1, -1, group, -1, -1
    )
    queries = query.view(num_tokens, num_kv, group, head_dim).permute(1, 2, 0, 3)
    pieces = _pieces(queries, seen.shape[3], chunk.bias is not None)
    attended = []
    for heads, rows in pieces:
        attended.append(
            F.scaled_dot_product_attention(
                queries[heads, :, rows],
                seen[0, heads],
                seen[1, heads],
                attn_mask=None if chunk.bias is None else chunk.bias[rows],
                is_causal=chunk.bias is None,
            )
        )
        marks.mark()
    mixed = attended[0]
    if len(pieces) > 1:
        mixed = torch.empty_like(queries)
        for (heads, rows), part in zip(pieces, attended, strict=True):
            mixed[heads, :, rows] = part
    return mixed.permute(2, 0, 1, 3).reshape(num_tokens, num_heads * head_dim)


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
