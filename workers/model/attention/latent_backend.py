"""Latent attention: one backend over the latents themselves, which serves rows that decode, and one over keys
and values that are expanded from them for a chunk of a prompt.

A token has one row in the KV, [kv_lora_rank + qk_rope_head_dim]: its normed latent, and the rotated part of
keys that all heads share. In the *absorbed* form all heads of queries share this row, as key and as value:
products of the heads turn queries into queries of latents, and mixed latents into values. In the *expanded*
form keys and values of some heads at a time are computed from the latents of a sequence. A sequence takes the
form with fewer operations (`LatentShape.is_expansion_cheaper`), unless results must not depend on its chunks:
then, and where blocks lie in host memory, all are absorbed. In 8 bits a latent has a scale, and so has the
rotated part: these differ in size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.attention.expanded_latents import ExpandedChunk
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    HostReader,
    LayerAttention,
    LayerRead,
    MakeBackend,
    StepInput,
    to_device,
)
from workers.model.attention.quantized_kv import head_dim_of, is_quantized
from workers.model.attention.rotary import rope_table, rotate
from workers.model.latent_heads import LatentHeads
from workers.model.latent_shape import LatentShape, expanded_capacity
from workers.model.scaled_heads import ScaledHeads


class LatentAttention(AttentionBackend):
    """Attention over a rank's latents, `kv` [num_blocks, num_layers, 1, 1, block_tokens, width]."""

    def __init__(
        self, shape: AttentionShape, kv: Tensor, make: MakeBackend, num_absorbed_heads: int | None = None
    ) -> None:
        """`make` makes the backend of queries of latents, over a view of `kv` in which rows are keys and
        values. It has `num_absorbed_heads`; None: those of the shape."""
        super().__init__(shape, kv)
        assert shape.latent is not None
        assert kv.shape[2:4] == (1, 1), "there is one row for a token"
        self.latent = shape.latent
        assert head_dim_of(kv, len(self.latent.parts)) == self.latent.width
        # Converts rows between the dtype of activations and 8 bits; None: the KV has that of activations.
        self.scaled: ScaledHeads | None = None
        if is_quantized(kv):
            self.scaled = ScaledHeads(self.latent.parts, kv.dtype, self.dtype, kv.shape[4])
        scale = shape.scale(self.latent.head_dim)
        self._alike = dataclasses.replace(shape, rotations=(), latent=None, score_scale=scale)
        absorbed = dataclasses.replace(
            self._alike,
            value_dim=self.latent.kv_lora_rank,
            num_heads=num_absorbed_heads or shape.num_heads,
        )
        self.absorbed = make(absorbed, _as_both_kinds(kv))
        self.name = self.absorbed.name
        self.can_stage = self.absorbed.can_stage
        self.is_deterministic = self.absorbed.is_deterministic
        self.can_capture = self.absorbed.can_capture
        self._expanded_memory = torch.empty(0, dtype=self.dtype, device=kv.device)

    def plan(self, step: StepInput) -> AttentionPlan:
        return LatentPlan(self, step)

    def expanded(self, num_tokens: int) -> AttentionBackend:
        """Return the backend of as many heads as are expanded at a time for `num_tokens` tokens, over memory
        that it shares with all others: [1, 1, 2, num_expanded, more than num_tokens, head_dim]."""
        latent, dtype = self.latent, self.dtype
        capacity = expanded_capacity(num_tokens)
        num_heads = latent.num_expanded_heads(self.shape.num_heads, capacity, dtype.itemsize)
        num_items = 2 * num_heads * capacity * latent.head_dim
        if self._expanded_memory.numel() < num_items:
            # Attention may multiply what no token has written with zero.
            self._expanded_memory = torch.zeros(num_items, dtype=dtype, device=self.kv.device)
        kv = self._expanded_memory[:num_items].view(1, 1, 2, num_heads, capacity, latent.head_dim)
        shape = dataclasses.replace(self._alike, num_heads=num_heads, windows=(0,), dtype=None)
        return self.absorbed.over(shape, kv)

    def over(self, shape: AttentionShape, kv: Tensor) -> AttentionBackend:
        raise NotImplementedError("latents have one KV")


class LatentPlan(AttentionPlan):
    """The attention of one step over latents."""

    def __init__(self, backend: LatentAttention, step: StepInput) -> None:
        super().__init__(step)
        self._backend, self._latent = backend, backend.latent
        self._num_heads = backend.shape.num_heads
        kv = backend.kv
        positions, blocks = _places(step, kv.device)
        self._rotations = [rope_table(positions, it, backend.dtype) for it in backend.shape.rotations]
        self._block_tokens = step.block_tokens
        # The heads of the KV in layer 0 in which the tokens' rows lie, and their places there.
        self._heads, self._offsets = blocks.long() * kv.shape[1], (positions % self._block_tokens).long()
        self._memory = kv.flatten(0, 3)
        is_expanded = _expanded(backend, step)
        self._chunks = [_PagedChunk(backend, step, number) for number in is_expanded.nonzero()[0].tolist()]
        self._absorbed: AttentionPlan | None = None
        self._absorbed_rows: Tensor | None = None
        if not is_expanded.any():
            host = None if step.host is None else _LatentReader(step.host)
            self._absorbed = backend.absorbed.plan(dataclasses.replace(step, host=host))
        elif not is_expanded.all():
            self._absorbed = backend.absorbed.plan(_part_of(step, ~is_expanded))
            (rows,) = np.repeat(~is_expanded, step.lengths).nonzero()
            self._absorbed_rows = to_device(rows, kv.device)

    def run(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        queries, row = rotated_parts(self._latent, self._num_heads, self._rotations[layer.rotation], qkv)
        self._write(layer.index, row)
        return self.attend(layer, queries)

    def _write(self, layer: int, row: Tensor) -> None:
        """Write the tokens' rows [num_tokens, width] of a layer."""
        heads = self._heads + layer
        if self._backend.scaled is not None:
            self._backend.scaled.write(row, self._memory, heads, self._offsets)
            return
        rows = heads * self._block_tokens + self._offsets
        self._memory.view(-1, self._latent.width).index_copy_(0, rows, row)

    def attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        latent, rows = self._latent, self._absorbed_rows
        by_head = queries.view(len(queries), self._num_heads, latent.head_dim)
        mixed = queries.new_empty(len(queries), self._num_heads, latent.v_head_dim)
        if self._absorbed is not None and rows is None:
            self._attend_absorbed(self._absorbed, layer, by_head, mixed)
        elif self._absorbed is not None and rows is not None:
            part = mixed.new_empty(len(rows), *mixed.shape[1:])
            self._attend_absorbed(self._absorbed, layer, by_head.index_select(0, rows), part)
            mixed.index_copy_(0, rows, part)
        for chunk in self._chunks:
            chunk.attend(layer, queries, mixed)
        return mixed.flatten(1)

    def _attend_absorbed(
        self, plan: AttentionPlan, layer: LayerAttention, queries: Tensor, mixed: Tensor
    ) -> None:
        """Attend from `queries` [num_rows, num_heads, head_dim] to latents, into `mixed` [num_rows,
        num_heads, v_head_dim]."""
        wide = absorbed_queries(self._latent, layer, queries)
        latents = plan.attend(layer, wide.flatten(1)).view(len(wide), self._num_heads, -1)
        heads_of(layer).values(latents[..., : self._latent.kv_lora_rank], mixed)


class _PagedChunk:
    """A chunk whose latents are gathered from the blocks of its sequence."""

    def __init__(self, backend: LatentAttention, step: StepInput, number: int) -> None:
        """Plan sequence `number` of a step."""
        start, num_tokens = int(step.starts[number]), int(step.lengths[number])
        self._latent, self._kv, self._scaled = backend.latent, backend.kv, backend.scaled
        num_blocks = -(-(start + num_tokens) // step.block_tokens)
        table = step.tables[step.slots[number], :num_blocks]
        if start <= (num_blocks - 1) * step.block_tokens:
            # Later steps may multiply what no token has written with zero.
            backend.kv[int(table[-1])].view(torch.uint8).zero_()
        self._blocks = to_device(table.astype(np.int64), backend.kv.device)
        first = int(step.lengths[:number].sum())
        expanded = backend.expanded(start + num_tokens)
        self._chunk = ExpandedChunk(backend.latent, expanded, start, num_tokens, first, step.marks)

    def attend(self, layer: LayerAttention, queries: Tensor, mixed: Tensor) -> None:
        """Attend from the chunk's `queries` [num_tokens, num_heads * head_dim], of the whole step, into its
        `mixed` [num_tokens, num_heads, v_head_dim]."""
        latents = self._kv[:, layer.index, 0, 0]
        if self._scaled is None:
            latents = latents.index_select(0, self._blocks)
        else:
            blocks = latents.view(torch.uint8).index_select(0, self._blocks).view(latents.dtype)
            latents = queries.new_empty(*blocks.shape[:2], self._latent.width)
            self._scaled.widen(blocks, latents)
        latents = latents.view(-1, self._latent.width)[: self._chunk.num_context]
        self._chunk.attend(heads_of(layer), latents, queries, mixed)


class _LatentReader(HostReader):
    """Reads latents in host memory as keys and values."""

    def __init__(self, host: HostReader) -> None:
        super().__init__(host.first_id)
        self.is_staged = host.is_staged
        self._host = host

    def begin(self, reads: Sequence[LayerRead]) -> None:
        self._host.begin(reads)

    def layer(self, layer: int) -> Tensor:
        return self._host.layer(layer).expand(-1, 2, -1, -1, -1)

    def in_place(self) -> Tensor:
        return _as_both_kinds(self._host.in_place())

    def done(self, layer: int) -> None:
        self._host.done(layer)

    def close(self) -> None:
        """Do nothing: the reader of latents is closed by its owner."""


def _as_both_kinds(kv: Tensor) -> Tensor:
    """Return the view [num_blocks, num_layers, 2, ...] of latents in which keys and values are the same."""
    return kv.expand(-1, -1, 2, -1, -1, -1)


def rotated_parts(
    latent: LatentShape, num_heads: int, table: tuple[Tensor, Tensor], qkv: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate what is to be in `qkv` [num_tokens, num_heads * head_dim + width], in place, by cosines and
    sines. Returns queries [num_tokens, num_heads * head_dim] and rows of the KV [num_tokens, width]."""
    queries, rows = torch.split(qkv, [num_heads * latent.head_dim, latent.width], 1)
    by_head = queries.view(len(queries), num_heads, latent.head_dim)
    for part in (by_head[..., latent.qk_nope_head_dim :], rows[:, None, latent.kv_lora_rank :]):
        part.copy_(rotate(part, *table))
    return queries, rows


def absorbed_queries(latent: LatentShape, layer: LayerAttention, queries: Tensor) -> Tensor:
    """Return `queries` [num_rows, num_heads, head_dim] as queries of latents [num_rows, num_heads, width]."""
    num_unrotated, rank = latent.qk_nope_head_dim, latent.kv_lora_rank
    wide = queries.new_empty(*queries.shape[:2], latent.width)
    heads_of(layer).absorb(queries[..., :num_unrotated], wide[..., :rank])
    wide[..., rank:] = queries[..., num_unrotated:]
    return wide


def heads_of(layer: LayerAttention) -> LatentHeads:
    """Return the heads of a layer of latents."""
    assert layer.latent is not None, "a layer of latents has heads that read them"
    return layer.latent


def _expanded(backend: LatentAttention, step: StepInput) -> NDArray[np.bool_]:
    """Return which sequences take keys and values that are expanded."""
    if backend.is_deterministic or step.host is not None:
        return np.zeros(len(step.lengths), dtype=np.bool_)
    return cheaper_expanded(backend.latent, step.starts, step.lengths)


def cheaper_expanded(
    latent: LatentShape, starts: NDArray[np.int32], lengths: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Return which sequences take fewer operations with keys and values that are expanded."""
    is_chunk: NDArray[np.bool_] = lengths > 1
    for number in is_chunk.nonzero()[0].tolist():
        is_chunk[number] = latent.is_expansion_cheaper(int(starts[number]), int(lengths[number]))
    return is_chunk


def _part_of(step: StepInput, is_part: NDArray[np.bool_]) -> StepInput:
    """Return the step of some of its sequences."""
    starts, lengths, slots = (it[is_part] for it in (step.starts, step.lengths, step.slots))
    return dataclasses.replace(step, slots=slots, starts=starts, lengths=lengths, device=None)


def _places(step: StepInput, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of the new tokens and their blocks, [num_tokens], on the device. Where each
    sequence has one, and the device knows them, they are read there alone, as `DeviceStep` demands."""
    known = step.device
    if known is not None and (step.lengths == 1).all():
        return known.starts, known.tables[known.slots, known.starts // step.block_tokens]
    positions = step.positions()
    return to_device(positions, device), to_device(step.token_blocks(positions), device)
