"""Attention in plain torch, on any device: the reference for every other backend.

A step's tokens are written to their blocks; then each layer attends (`gathered_attention`) to the keys that
its window sees (`window_views`). Scores and probabilities are float32 whatever the dtype of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.attention.gathered_attention import GatheredLayer, Scores, attend, attend_parts
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    LayerAttention,
    LayerRead,
    PartialResults,
    StepInput,
    kv_shape,
    to_device,
)
from workers.model.attention.kv_rows import KvRows
from workers.model.attention.quantized_kv import Quantized, is_quantized, quantized_parts
from workers.model.attention.rotary import rope_table, rotate
from workers.model.attention.window_views import WindowView, plan_window, step_spans


class TorchAttention(AttentionBackend):
    """Attention in plain torch."""

    name = "torch"
    can_stage = True
    is_deterministic = False

    def __init__(self, shape: AttentionShape, kv: Tensor) -> None:
        super().__init__(shape, kv)
        self._kv_shape = kv_shape(kv, shape.num_scales)
        self.rows = KvRows.of(kv)

    def over(self, shape: AttentionShape, kv: Tensor) -> TorchAttention:
        return TorchAttention(shape, kv)

    def plan(self, step: StepInput) -> TorchPlan:
        spans = step_spans(step)
        window_to_view = {
            window: plan_window(spans, step.host, window, self.rows, self.dtype)
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
        self._kv_shape = shape = kv_shape(kv, backend.shape.num_scales)
        self._num_heads = backend.shape.num_heads
        self._parts = backend.shape.parts(shape.head_dim)
        self._scores = Scores(backend.shape.scale(shape.head_dim), backend.shape.softcap)
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

    def attend_parts(self, layer: LayerAttention, queries: Tensor) -> PartialResults:
        assert self._host is None
        seen = GatheredLayer(
            self._kv_rows, layer.index, self._kv_shape, self._dtype, self._scores, self._parts
        )
        by_head = queries.view(len(queries), -1, self._kv_shape.head_dim)
        return attend_parts(by_head, seen, self.window_to_view[layer.window], self.marks)

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
        seen = GatheredLayer(
            self._kv_rows, layer.index, self._kv_shape, self._dtype, self._scores, self._parts
        )
        if layer.sinks is not None:
            seen = seen._replace(sinks=layer.sinks.view(self._kv_shape.num_kv_heads, -1, 1))
        if host is None or not view.host_ids:
            return attend(query, seen, view, self.marks)
        mixed = attend(query, seen._replace(in_host=host.layer(layer.index)), view, self.marks)
        host.done(layer.index)
        return mixed
