"""Scan tokens by the states of Mamba-2 in plain torch, float32: token by token, or in chunks of tokens by
matrix products."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from workers.model.state.layer_states import LayerStates

# The tokens that are computed together by products.
CHUNK_TOKENS = 64


class ScanHeads(NamedTuple):
    """The heads of Mamba-2 at a rank. Each has a state [state_size, head_dim]; those of the heads of a part
    of a state, one after another, are behind its first `num_kept` elements. For each head, float32
    [num_heads]: the bias of its time steps, which are within `limits`, its decay and the factor of what
    passes by the state; and int64 its group, among the rank's `num_groups`."""

    head_dim: int
    state_size: int
    num_groups: int
    num_kept: int
    limits: tuple[float, float]
    step_bias: Tensor
    decay: Tensor
    skip: Tensor
    groups: Tensor

    @property
    def num_heads(self) -> int:
        return len(self.decay)

    @property
    def inner_size(self) -> int:
        """The columns of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """The columns of all heads, and then of both kinds of columns of groups."""
        return self.inner_size + 2 * self.num_groups * self.state_size


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


class TorchScan:
    """Scans tokens; in chunks, unless sequences decode or results shall not depend on chunks."""

    def __init__(self, heads: ScanHeads, *, is_deterministic: bool) -> None:
        self._heads, self._is_deterministic = heads, is_deterministic

    def __call__(self, convolved: Tensor, steps: Tensor, states: LayerStates) -> Tensor:
        """Scan the channels `convolved` [num_tokens, num_channels] with `steps` [num_tokens, num_heads]
        before bias and activation, and leave the states of each sequence behind its last token. Returns
        float32 [num_tokens, num_heads * head_dim]."""
        heads, (blocks, step) = self._heads, states
        reads, writes = step.on(blocks.device)
        of_heads = blocks[:, :, heads.num_kept :]
        kept = of_heads[reads.clamp(min=0)].masked_fill((reads < 0)[:, None, None], 0.0)
        kept = kept.view(len(reads), heads.num_heads, heads.state_size, heads.head_dim)
        scan = scan_tokens if step.is_decode or self._is_deterministic else scan_chunks
        inputs = self._inputs(convolved.float(), steps)
        mixed = scan(inputs, kept, heads.decay, heads.groups, step.lengths)
        of_heads[writes] = kept.view(len(writes), *of_heads.shape[1:])
        return mixed.add_(inputs.x * heads.skip[:, None]).flatten(1)

    def _inputs(self, convolved: Tensor, steps: Tensor) -> ScanInputs:
        heads = self._heads
        of_groups = heads.num_groups * heads.state_size
        x, b, c = torch.split(convolved, [heads.inner_size, of_groups, of_groups], 1)
        return ScanInputs(
            x.reshape(len(x), heads.num_heads, -1),
            F.softplus(steps.float() + heads.step_bias).clamp(*heads.limits),
            b.reshape(len(x), heads.num_groups, -1),
            c.reshape(len(x), heads.num_groups, -1),
        )


def scan_tokens(
    inputs: ScanInputs, states: Tensor, decay: Tensor, groups: Tensor, lengths: NDArray[np.int32]
) -> Tensor:
    """Scan the tokens of sequences of these `lengths`, whose `states` [num_sequences, num_heads, state_size,
    head_dim] are overwritten by those behind their last tokens; heads decay by `decay` [num_heads], and are
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
        own += b[:, groups][..., None] * (steps[..., None] * x)[:, :, None]
        states[chosen] = own
        mixed[rows] = (own * c[:, groups][..., None]).sum(2)
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
    """Scan one chunk of a sequence, whose `state` [num_heads, state_size, head_dim] is overwritten."""
    x, steps, b, c = (it.transpose(0, 1) for it in inputs)  # heads and groups first
    sums = (steps * decay[:, None]).cumsum(1)
    # The decay between any two tokens, 0 where the second comes first.
    between = torch.exp((sums[:, :, None] - sums[:, None]).tril()).tril()
    scores = torch.bmm(c, b.transpose(1, 2))[groups] * between
    weighted = x * steps[..., None]
    of_heads = c[groups] * torch.exp(sums)[..., None]
    mixed = torch.bmm(scores, weighted).baddbmm_(of_heads, state)
    ends = torch.exp(sums[:, -1:] - sums)[..., None]
    added = torch.bmm(b[groups].transpose(1, 2), weighted * ends)
    state.mul_(torch.exp(sums[:, -1])[:, None, None]).add_(added)
    return mixed.transpose(0, 1)
