"""Mix tokens by Mamba-2: convolved channels, a state of each head that decays, and a gated norm.

What is convolved is activated and rounded to the model's dtype; all else is float32. For a token with the
time step d, the state h of a head [head_dim, state_size] becomes h * exp(d * a) + d * x ⊗ b, and gives
h · c + skip * x, with b and c of the head's group."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.state.causal_conv import CausalConv
from workers.model.state.gated_norm import GatedNorm
from workers.model.state.mamba2_scan import ScanInputs, scan_chunks, scan_tokens
from workers.model.state.mamba2_shape import Mamba2Shape
from workers.model.state.state_mixer import LayerStates, StateMixer


class _Widths(NamedTuple):
    """The columns of the product of the hidden states at a rank: gates, convolved channels, time steps."""

    gates: int
    channels: int
    steps: int


class Mamba2(StateMixer):
    """The heads of a rank that holds the parts `held` of `num_parts`."""

    def __init__(
        self,
        shape: Mamba2Shape,
        held: range,
        num_parts: int,
        kernel: Tensor,
        conv_bias: Tensor | None,
        of_heads: tuple[Tensor, Tensor, Tensor],
        norm: GatedNorm,
        *,
        is_deterministic: bool,
    ) -> None:
        """`of_heads` are the bias of time steps, the logarithm of the decay and the skip, float32 [num_heads]
        each; the others as in `Mamba2Weights`."""
        self._shape, self._norm = shape, norm
        self._step_bias, decay_log, self._skip = of_heads
        self._decay = -torch.exp(decay_log)
        self._num_heads = len(decay_log)
        self._groups = shape.groups_of(held, num_parts)
        inner = self._num_heads * shape.head_dim
        self._widths = _Widths(inner, len(kernel), self._num_heads)
        channels = _channels_of_parts(shape, held, num_parts).to(kernel.device)
        self._conv = CausalConv(kernel, conv_bias, channels)
        self._conv_size = self._conv.part_size(len(held))
        first = held.start * shape.part_heads(num_parts)
        in_group = shape.num_heads // shape.num_groups
        of_head = [head // in_group - self._groups.start for head in range(first, first + self._num_heads)]
        # The group of each head, among those of the rank.
        self._group_of_head = torch.tensor(of_head, device=kernel.device)
        self._is_deterministic = is_deterministic

    @property
    def num_summed(self) -> int:
        return self._norm.num_summed

    def join(self, all_reduce: Callable[[Tensor], None], tp: int) -> None:
        self._norm.join(all_reduce, tp)

    def mix(self, projected: Tensor, states: LayerStates) -> Tensor:
        gates, channels, steps = torch.split(projected, list(self._widths), 1)
        convolved = F.silu(self._conv.convolve(channels, states)).to(projected.dtype).float()
        mixed = self._scan(self._inputs(convolved, steps), states)
        return self._norm.normalize(mixed, gates)

    def _inputs(self, convolved: Tensor, steps: Tensor) -> ScanInputs:
        """Return what the states of heads take of the tokens."""
        num_groups, size = len(self._groups), self._shape.state_size
        x, b, c = torch.split(convolved, [self._widths.gates, num_groups * size, num_groups * size], 1)
        least, most = self._shape.step_limits
        return ScanInputs(
            x.reshape(len(x), self._num_heads, -1),
            F.softplus(steps.float() + self._step_bias).clamp(least, most),
            b.reshape(len(x), num_groups, size),
            c.reshape(len(x), num_groups, size),
        )

    def _scan(self, inputs: ScanInputs, states: LayerStates) -> Tensor:
        """Bring the states of each sequence behind its last token. Returns float32 [num_tokens, num_heads *
        head_dim]."""
        blocks, step = states
        reads, writes = step.on(blocks.device)
        of_heads = blocks[:, :, self._conv_size :]
        kept = of_heads[reads.clamp(min=0)].masked_fill((reads < 0)[:, None, None], 0.0)
        kept = kept.view(len(reads), self._num_heads, self._shape.head_dim, self._shape.state_size)
        scan = scan_tokens if step.is_decode or self._is_deterministic else scan_chunks
        mixed = scan(inputs, kept, self._decay, self._group_of_head, step.lengths)
        of_heads[writes] = kept.view(len(writes), *of_heads.shape[1:])
        return mixed.add_(inputs.x * self._skip[:, None]).flatten(1)


def _channels_of_parts(shape: Mamba2Shape, held: range, num_parts: int) -> Tensor:
    """Return the convolved channels of a rank that each of its parts keeps, int64 [num_parts_held,
    num_channels_of_part]: those of its heads, and both kinds of those of its groups."""
    part, size = shape.part_heads(num_parts) * shape.head_dim, shape.state_size
    groups, num_inner = shape.groups_of(held, num_parts), len(held) * part
    found = []
    for number, its in enumerate(held):
        own = shape.groups_of(range(its, its + 1), num_parts)
        start, stop = (it - groups.start for it in (own.start, own.stop))
        of_heads = torch.arange(number * part, (number + 1) * part)
        of_groups = torch.arange(start * size, stop * size)
        found.append(torch.cat((of_heads, num_inner + of_groups, num_inner + len(groups) * size + of_groups)))
    return torch.stack(found)
