"""Latent attention of ranks that divide the latents of each block by its tokens (`LatentSplit`).

In the absorbed form, which decodes, the ranks gather the queries of all heads. Each attends with all of them
to the latents that it holds, and gives each rank the results of its heads, with the logarithms of their
sums, by which that rank merges them. In the expanded form, of long chunks of prompts, they gather the latents
of the context before the chunk, and each attends with its own heads. A sequence takes the form with fewer
operations (`LatentShape.is_expansion_cheaper`), as where ranks hold copies of all latents.

All ranks compute the latents of new tokens, and each writes those that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.attention.expanded_latents import ExpandedChunk
from workers.model.attention.held_latents import HeldLatents, TiledBackends
from workers.model.attention.interface import (
    AttentionPlan,
    AttentionShape,
    LayerAttention,
    MakeBackend,
    StepInput,
)
from workers.model.attention.latent_backend import (
    LatentAttention,
    absorbed_queries,
    cheaper_expanded,
    heads_of,
    rotated_parts,
)
from workers.model.attention.rotary import rope_table
from workers.model.exchange_sizes import ExchangeSizes
from workers.model.expert_rows import RowExchange
from workers.model.latent_split import MOST_EXCHANGED_BYTES, Counts, LatentSplit, queried_row_bytes


class SplitLatentAttention(LatentAttention):
    """Attention over a rank's part of the latents, `kv` [num_blocks, num_layers, 1, 1, part_tokens,
    width]."""

    def __init__(
        self,
        shape: AttentionShape,
        kv: Tensor,
        make: MakeBackend,
        split: LatentSplit,
        num_heads: Sequence[int],
        ranks: RowExchange,
    ) -> None:
        """`shape` is of this rank's heads, and `num_heads` are those of each of the `ranks`. `make` is as in
        `LatentAttention`."""
        super().__init__(shape, kv, make, num_absorbed_heads=sum(num_heads))
        assert kv.shape[4] == split.part_tokens
        assert num_heads[ranks.tp_rank] == shape.num_heads
        self.split, self.num_heads, self.ranks = split, list(num_heads), ranks
        self.name = f"{self.name}, latents divided by {split.num_ranks}"
        self.is_deterministic = self.can_capture = self.can_stage = False
        self.tiled = TiledBackends(self.absorbed)
        sizes = self.latent.width, self.latent.kv_lora_rank, kv.dtype.itemsize
        self.most_rows = max(1, MOST_EXCHANGED_BYTES // queried_row_bytes(sum(num_heads), *sizes))

    @property
    def block_tokens(self) -> int:
        return self.split.block_tokens

    def plan(self, step: StepInput) -> SplitLatentPlan:
        assert step.host is None, "blocks in host memory are not divided"
        return SplitLatentPlan(self, step)

    def exchanges(self, starts: NDArray[np.int32], lengths: NDArray[np.int32]) -> list[ExchangeSizes]:
        is_expanded = cheaper_expanded(self.latent, starts, lengths)
        num_rows = int(lengths[~is_expanded].sum())
        found: list[ExchangeSizes] = []
        for rows in self.turns(num_rows):
            found += self.of_queries(len(rows))
        contexts: list[int] = starts[is_expanded].tolist()
        return found + [self.of_latents(num_tokens) for num_tokens in contexts if num_tokens]

    def turns(self, num_rows: int) -> list[range]:
        """Divide rows that are queried, so that ranks exchange no more than there is memory for."""
        return [
            range(begin, min(begin + self.most_rows, num_rows))
            for begin in range(0, num_rows, self.most_rows)
        ]

    def of_queries(self, num_rows: int) -> tuple[ExchangeSizes, ExchangeSizes]:
        """Return the exchanges of queries of latents, a row for each token and head, and of results, with
        the logarithm of the sum behind the columns."""
        num_ranks, latent = len(self.num_heads), self.latent
        own = [num_rows * self.shape.num_heads] * num_ranks
        of_all = [num_rows * count for count in self.num_heads]
        return (
            ExchangeSizes(own, of_all, latent.width),
            ExchangeSizes(of_all, own, latent.kv_lora_rank + 1, torch.float32),
        )

    def of_latents(self, num_tokens: int) -> ExchangeSizes:
        """Return the exchange of the first `num_tokens` latents of a sequence."""
        before = np.array(num_tokens)
        counts = [int(self.split.num_held(before, rank)) for rank in range(self.split.num_ranks)]
        own = [counts[self.ranks.tp_rank]] * self.split.num_ranks
        return ExchangeSizes(own, counts, self.latent.width)

    def gathered(self, part: Tensor, sizes: ExchangeSizes) -> list[Tensor]:
        """Give each rank the same `part`, and return what each gives."""
        return self.ranks.exchange([part] * len(sizes.sent), sizes.received)


class SplitLatentPlan(AttentionPlan):
    """The attention of one step over latents that the ranks of a stage divide."""

    def __init__(self, backend: SplitLatentAttention, step: StepInput) -> None:
        super().__init__(step)
        self._backend, self._latent = backend, backend.latent
        split, rank, kv = backend.split, backend.ranks.tp_rank, backend.kv
        positions = step.positions()
        self._rotations = [
            rope_table(torch.from_numpy(positions), it, kv.dtype) for it in backend.shape.rotations
        ]
        (own,) = (split.owners(positions) == rank).nonzero()
        held = positions[own] % split.part_tokens
        blocks = step.token_blocks(positions)[own].astype(np.int64)
        # The rows of the step whose latents are held here, and their places in layer 0 of the KV.
        self._own = torch.from_numpy(own)
        self._places = torch.from_numpy(blocks * (kv.shape[1] * split.part_tokens) + held)
        self._memory = kv.view(-1, self._latent.width)
        is_expanded = cheaper_expanded(self._latent, step.starts, step.lengths)
        slots = np.repeat(step.slots, step.lengths)
        (rows,) = np.repeat(~is_expanded, step.lengths).nonzero()
        self._queried = [
            _QueriedRows(backend, step, rows[turn.start : turn.stop], slots, positions)
            for turn in backend.turns(len(rows))
        ]
        self._chunks = [_GatheredChunk(backend, step, number) for number in is_expanded.nonzero()[0].tolist()]

    def run(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        latent, num_heads = self._latent, self._backend.shape.num_heads
        queries, latents = rotated_parts(latent, num_heads, self._rotations[layer.rotation], qkv)
        if len(self._own):
            places = self._places + layer.index * self._backend.split.part_tokens
            self._memory.index_copy_(0, places, latents.index_select(0, self._own))
        by_head = queries.view(len(queries), num_heads, latent.head_dim)
        mixed = queries.new_empty(len(queries), num_heads, latent.v_head_dim)
        for rows in self._queried:
            rows.attend(layer, by_head, mixed)
        for chunk in self._chunks:
            chunk.attend(layer, latents, queries, mixed)
        return mixed.flatten(1)

    def attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        raise NotImplementedError("layers of latents have their own, and attend where they write them")


class _QueriedRows:
    """Rows of a step that attend in the absorbed form: with the heads of all ranks to the latents that are
    held here."""

    def __init__(
        self,
        backend: SplitLatentAttention,
        step: StepInput,
        rows: Counts,
        slots: NDArray[np.int32],
        positions: Counts,
    ) -> None:
        """Plan these `rows` of a step; `slots` and `positions` are of all."""
        self._backend, self._rows = backend, torch.from_numpy(rows)
        self._sizes = backend.of_queries(len(rows))
        self._held = HeldLatents(
            backend.tiled, backend.split, backend.ranks.tp_rank, step, slots[rows], positions[rows]
        )

    def attend(self, layer: LayerAttention, queries: Tensor, mixed: Tensor) -> None:
        """Attend from `queries` [num_tokens, num_heads, head_dim], of the whole step, into its `mixed`
        [num_tokens, num_heads, v_head_dim]."""
        backend, num_rows, latent = self._backend, len(self._rows), self._backend.latent
        num_heads, (of_queries, of_results) = backend.num_heads, self._sizes
        wide = absorbed_queries(latent, layer, queries.index_select(0, self._rows))
        of_ranks = backend.gathered(wide.view(-1, latent.width), of_queries)
        parts = [part.view(num_rows, -1, latent.width) for part in of_ranks]
        results = self._results(layer, torch.cat(parts, 1))
        sent = [part.flatten(0, 1).contiguous() for part in torch.split(results, num_heads, 1)]
        received = backend.ranks.exchange(sent, of_results.received)
        merged = _merged(torch.stack(received)).to(queries.dtype)
        values = mixed.new_empty(num_rows, *mixed.shape[1:])
        heads_of(layer).values(merged.view(num_rows, -1, latent.kv_lora_rank), values)
        mixed.index_copy_(0, self._rows, values)

    def _results(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        """Attend from `queries` [num_rows, num_heads of all ranks, width] to the latents here. Returns
        float32 [num_rows, num_heads, kv_lora_rank + 1], the last of which are logarithms of sums."""
        rank = self._backend.latent.kv_lora_rank
        mixed, log_sums = self._held.attend(layer, queries)
        return torch.cat((mixed[..., :rank], log_sums[..., None]), 2)


class _Context(NamedTuple):
    """The latents before a chunk: the places of those that each rank holds, the blocks that have those of
    this rank, and how they are exchanged."""

    places: list[Tensor]
    blocks: Tensor
    sizes: ExchangeSizes


class _GatheredChunk:
    """The attention of a chunk in the expanded form. The latents of its own tokens are known to all ranks."""

    def __init__(self, backend: SplitLatentAttention, step: StepInput, number: int) -> None:
        """Plan sequence `number` of a step."""
        self._backend = backend
        split, rank = backend.split, backend.ranks.tp_rank
        self._start, num_tokens = int(step.starts[number]), int(step.lengths[number])
        table = step.tables[step.slots[number]]
        before, after = split.num_held(np.array([self._start, self._start + num_tokens]), rank).tolist()
        last = max(after - 1, 0) // split.part_tokens
        if before < after and before <= last * split.part_tokens:
            # Later steps may multiply what no token has written with zero.
            backend.kv[int(table[last])] = 0
        first = int(step.lengths[:number].sum())
        self._rows = slice(first, first + num_tokens)
        expanded = backend.expanded(self._start + num_tokens)
        self._chunk = ExpandedChunk(backend.latent, expanded, self._start, num_tokens, first, step.marks)
        self._context: _Context | None = None
        if self._start:
            places = [torch.from_numpy(split.held_places(self._start, it)) for it in range(split.num_ranks)]
            blocks = torch.from_numpy(table[: -(-before // split.part_tokens)].astype(np.int64))
            self._context = _Context(places, blocks, backend.of_latents(self._start))

    def attend(self, layer: LayerAttention, latents: Tensor, queries: Tensor, mixed: Tensor) -> None:
        """Attend from the chunk's `queries` [num_tokens, num_heads * head_dim], of the whole step, whose rows
        of the KV are `latents` [num_tokens, width], into its `mixed` [num_tokens, num_heads, v_head_dim]."""
        own = latents[self._rows]
        if self._context is not None:
            whole = own.new_empty(self._chunk.num_context, own.shape[1])
            self._gather(layer, self._context, whole)
            whole[self._start :] = own
            own = whole
        self._chunk.attend(heads_of(layer), own, queries, mixed)

    def _gather(self, layer: LayerAttention, context: _Context, whole: Tensor) -> None:
        """Fill in the latents before the chunk, which the ranks hold."""
        backend = self._backend
        held = backend.kv[:, layer.index, 0, 0].index_select(0, context.blocks).view(-1, whole.shape[1])
        own = held[: context.sizes.sent[0]]
        for places, part in zip(context.places, backend.gathered(own, context.sizes), strict=True):
            whole.index_copy_(0, places, part)


def _merged(parts: Tensor) -> Tensor:
    """Merge results of attention to different keys, float32 [num_parts, num_rows, num_columns + 1], the last
    of which are the logarithms of the sums that they are divided by: [num_rows, num_columns]."""
    shares = torch.softmax(parts[..., -1:], 0)
    return (parts[..., :-1] * shares).sum(0)
