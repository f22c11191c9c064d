"""Attention of rows of a step, with the heads of all ranks, to the latents that one rank holds."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    LayerAttention,
    PartialResults,
    StepInput,
)
from workers.model.latent_split import Counts, LatentSplit

# Tokens that see the same latents are computed together up to so many rows of their heads, so that what is
# read of latents serves all of them.
_MOST_TILE_ROWS = 512


class TiledBackends:
    """The backends of queries of latents for one token, and for several that see the same latents: the heads
    of all of these are the heads of one."""

    def __init__(self, backend: AttentionBackend) -> None:
        """`backend` is that of one token."""
        self._size_to_backend = {1: backend}
        self.most_tokens = max(1, _MOST_TILE_ROWS // backend.shape.num_heads)

    def of(self, num_tokens: int) -> AttentionBackend:
        """Return the backend of so many tokens."""
        if num_tokens not in self._size_to_backend:
            one = self._size_to_backend[1]
            shape = dataclasses.replace(one.shape, num_heads=num_tokens * one.shape.num_heads)
            self._size_to_backend[num_tokens] = one.over(shape, one.kv)
        return self._size_to_backend[num_tokens]


class _Tiles(NamedTuple):
    """A plan of tiles of `size` tokens, and the `rows` of these tokens, one tile after another."""

    plan: AttentionPlan
    rows: Tensor
    size: int


class _Run(NamedTuple):
    """Consecutive rows of one sequence, [first, end), whose tokens are all held by one rank and in one block:
    if `is_held`, by this one."""

    first: int
    end: int
    is_held: bool


class HeldLatents:
    """The latents that rank `rank` of a `split` holds, as rows of a step see them."""

    def __init__(
        self,
        backends: TiledBackends,
        split: LatentSplit,
        rank: int,
        step: StepInput,
        slots: NDArray[np.int32],
        positions: Counts,
    ) -> None:
        """Plan rows whose sequences have these `slots` of the step, and whose tokens are at `positions`."""
        self._num_seen = split.num_held(positions + 1, rank)
        self._backends, self._step, self._slots = backends, step, slots
        self._part_tokens = split.part_tokens
        self._tiles = self._plan(_runs(split, rank, slots, positions))

    def attend(self, layer: LayerAttention, queries: Tensor) -> PartialResults:
        """Attend from `queries` [num_rows, num_heads, width]. Rows that see nothing here have zeros, and the
        logarithm of zero."""
        if len(self._tiles) == 1 and len(self._tiles[0].rows) == len(queries):
            return _attended(self._tiles[0], layer, queries)
        mixed = queries.new_zeros(queries.shape, dtype=torch.float32)
        log_sums = mixed.new_full(queries.shape[:2], float("-inf"))
        for tiles in self._tiles:
            part = _attended(tiles, layer, queries.index_select(0, tiles.rows))
            mixed.index_copy_(0, tiles.rows, part.mixed)
            log_sums.index_copy_(0, tiles.rows, part.log_sums)
        return PartialResults(mixed, log_sums)

    def _plan(self, runs: list[_Run]) -> list[_Tiles]:
        """Plan the runs: in a causal way those that are held here, of which each token sees one more than the
        token before it; else in tiles, of which all tokens see the same."""
        causal: list[range] = []
        size_to_tiles: dict[int, list[int]] = {}
        for run in runs:
            if run.is_held or run.end - run.first == 1:
                causal.append(range(run.first, run.end))
                continue
            for first in range(run.first, run.end, self._backends.most_tokens):
                size = min(self._backends.most_tokens, run.end - first)
                size_to_tiles.setdefault(size, []).append(first)
        planned = [self._planned(1, causal)] if causal else []
        for size, firsts in size_to_tiles.items():
            planned.append(self._planned(size, [range(first, first + size) for first in firsts]))
        return planned

    def _planned(self, size: int, spans: list[range]) -> _Tiles:
        """Plan spans of rows, each of which is a sequence of its own, with one new token where several rows
        are its heads."""
        firsts = np.array([span.start for span in spans])
        lengths = [len(span) if size == 1 else 1 for span in spans]
        step = StepInput(
            tables=self._step.tables,
            slots=self._slots[firsts],
            starts=(self._num_seen[firsts] - 1).astype(np.int32),
            lengths=np.array(lengths, dtype=np.int32),
            block_tokens=self._part_tokens,
            marks=self._step.marks,
        )
        rows = torch.tensor([row for span in spans for row in span])
        return _Tiles(self._backends.of(size).plan(step), rows, size)


def _runs(split: LatentSplit, rank: int, slots: NDArray[np.int32], positions: Counts) -> list[_Run]:
    """Return the runs of rows that see any of the latents of a rank."""
    parts, owners = positions // split.part_tokens, split.owners(positions)
    num_seen = split.num_held(positions + 1, rank)
    begins = np.flatnonzero((np.diff(slots) != 0) | (np.diff(parts) != 0)) + 1
    borders = [0, *begins.tolist(), len(slots)]
    return [
        _Run(first, end, bool(owners[first] == rank))
        for first, end in itertools.pairwise(borders)
        if num_seen[first]
    ]


def _attended(tiles: _Tiles, layer: LayerAttention, queries: Tensor) -> PartialResults:
    """Attend from `queries` [num_rows, num_heads, width] of the rows of tiles."""
    mixed, log_sums = tiles.plan.attend_parts(layer, queries.view(len(queries) // tiles.size, -1))
    return PartialResults(mixed.view(queries.shape), log_sums.view(queries.shape[:2]))
