"""Run the gated delta rule by the Triton kernels of `workers.model.cuda.gated_delta`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.cuda.gated_delta import (
    DeltaChunks,
    DeltaSequences,
    gated_norm,
    run_chunks,
    run_tokens,
)
from workers.model.state.delta_rule import CHUNK_TOKENS, DeltaRows, DeltaWeights
from workers.model.state.delta_shape import DeltaHeads
from workers.model.state.state_step import StateStep

# Sequences of more tokens are computed in chunks.
_MOST_TOKENS = 8


class TritonDeltaRule:
    """The value heads of one layer, as `run_delta_rule` computes them up to rounding. `is_deterministic`:
    each token is computed as if it came alone."""

    def __init__(self, heads: DeltaHeads, weights: DeltaWeights, *, is_deterministic: bool = False) -> None:
        self._heads, self._weights, self._is_deterministic = heads, weights, is_deterministic

    def __call__(self, rows: DeltaRows, states: Tensor, step: StateStep, out: Tensor | None = None) -> Tensor:
        """Compute a step's outputs [num_tokens, num_value_heads * value_dim], written to `out` where it is
        given; `states` are as in `run_delta_rule`."""
        heads = self._heads
        shape = len(rows.channels), heads.num_value_heads, heads.value_dim
        mixed = torch.empty(shape, dtype=torch.float32, device=states.device)
        if (known := step.device) is not None and step.is_decode:
            sequences = DeltaSequences(known.reads, known.writes)
            run_tokens(heads, self._weights, rows, states, sequences, mixed)
        else:
            self._run_sequences(rows, states, step, mixed)
        return gated_norm(mixed, rows.gates, self._weights.norm, out)

    def _run_sequences(self, rows: DeltaRows, states: Tensor, step: StateStep, mixed: Tensor) -> None:
        firsts = (step.lengths.cumsum() - step.lengths).astype(np.int32)
        is_long = (step.lengths > _MOST_TOKENS) & (not self._is_deterministic)
        of_step = step.reads, step.writes, firsts, step.lengths
        for are_chunked in (False, True):
            chosen = is_long == are_chunked
            if not chosen.any():
                continue
            arrays = [it[chosen] for it in of_step]
            sequences = DeltaSequences(*_uploaded(arrays, states.device))
            if are_chunked:
                chunks = DeltaChunks(*_uploaded(_chunks(arrays[2], arrays[3]), states.device))
                run_chunks(self._heads, self._weights, rows, states, sequences, chunks, mixed)
            else:
                run_tokens(self._heads, self._weights, rows, states, sequences, mixed)


def _chunks(firsts: NDArray[np.int32], lengths: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Return the fields of `DeltaChunks` for sequences of these first tokens and lengths."""
    counts = -(-lengths // CHUNK_TOKENS)
    before = counts.cumsum() - counts
    offsets = (np.arange(counts.sum()) - before.repeat(counts)) * CHUNK_TOKENS
    tokens = firsts.repeat(counts) + offsets
    left = np.minimum(lengths.repeat(counts) - offsets, CHUNK_TOKENS)
    return [it.astype(np.int32) for it in (before, tokens, left)]


def _uploaded(arrays: list[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device at once."""
    joined = torch.from_numpy(np.concatenate(arrays)).to(device)
    return list(torch.split(joined, [len(it) for it in arrays]))
