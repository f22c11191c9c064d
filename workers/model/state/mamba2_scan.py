"""Scan tokens by the states of Mamba-2 in plain torch, float32: token by token, or in chunks of tokens by
matrix products."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The tokens that are computed together by products.
CHUNK_TOKENS = 64


class ScanInputs(NamedTuple):
    """What states take of tokens, float32: `x` [num_tokens, num_heads, head_dim], the time `steps`
    [num_tokens, num_heads], and for each group `b` and `c` [num_tokens, num_groups, state_size]."""

    x: Tensor
    steps: Tensor
    b: Tensor
    c: Tensor

    def at(self, rows: Tensor | slice) -> ScanInputs:
        """Return those of some tokens."""
        return ScanInputs(*(it[rows] for it in self))


def scan_tokens(
    inputs: ScanInputs, states: Tensor, decay: Tensor, groups: Tensor, lengths: NDArray[np.int32]
) -> Tensor:
    """Scan the tokens of sequences of these `lengths`, whose `states` [num_sequences, num_heads, head_dim,
    state_size] are overwritten by those behind their last tokens; heads decay by `decay` [num_heads], and are
    of the `groups` [num_heads]. Returns [num_tokens, num_heads, head_dim].

    The tokens of a sequence follow one another, so results do not depend on chunks."""
    mixed = torch.empty_like(inputs.x)
    starts = np.cumsum(lengths) - lengths
    for token in range(int(lengths.max())):
        running = np.flatnonzero(lengths > token)
        is_all = len(running) == len(lengths)
        rows: Tensor | slice = slice(None)
        if not (is_all and len(lengths) == len(mixed)):
            rows = torch.from_numpy(starts[running] + token).to(mixed.device)
        chosen: Tensor | slice = slice(None) if is_all else torch.from_numpy(running).to(mixed.device)
        x, steps, b, c = inputs.at(rows)
        own = states[chosen] * torch.exp(steps * decay)[..., None, None]
        own += (steps[..., None] * x)[..., None] * b[:, groups][:, :, None]
        states[chosen] = own
        mixed[rows] = (own * c[:, groups][:, :, None]).sum(-1)
    return mixed


def scan_chunks(
    inputs: ScanInputs, states: Tensor, decay: Tensor, groups: Tensor, lengths: NDArray[np.int32]
) -> Tensor:
    """Do the same in chunks: within one, each token takes those before it by a product of `c` and `b`, and
    all take what was before by the state. Sums are added up in another order than token by token."""
    mixed, start = torch.empty_like(inputs.x), 0
    for state, length in zip(states, lengths.tolist(), strict=True):
        for first in range(start, start + length, CHUNK_TOKENS):
            rows = slice(first, min(first + CHUNK_TOKENS, start + length))
            mixed[rows] = _scan_chunk(inputs.at(rows), state, decay, groups)
        start += length
    return mixed


def _scan_chunk(inputs: ScanInputs, state: Tensor, decay: Tensor, groups: Tensor) -> Tensor:
    """Scan one chunk of a sequence, whose `state` [num_heads, head_dim, state_size] is overwritten."""
    x, steps, b, c = (it.transpose(0, 1) for it in inputs)  # heads and groups first
    sums = (steps * decay[:, None]).cumsum(1)
    # The decay between any two tokens, 0 where the second comes first.
    between = torch.exp((sums[:, :, None] - sums[:, None]).tril()).tril()
    scores = torch.bmm(c, b.transpose(1, 2))[groups] * between
    weighted = x * steps[..., None]
    of_heads = c[groups] * torch.exp(sums)[..., None]
    mixed = torch.bmm(scores, weighted).baddbmm_(of_heads, state.transpose(1, 2))
    ends = torch.exp(sums[:, -1:] - sums)[..., None]
    added = torch.bmm((weighted * ends).transpose(1, 2), b[groups])
    state.mul_(torch.exp(sums[:, -1])[:, None, None]).add_(added)
    return mixed.transpose(0, 1)
