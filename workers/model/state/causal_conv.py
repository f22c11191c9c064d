"""Convolve the channels of each sequence over its last tokens, of which a state keeps the inputs.

Inputs of 16 bits are kept exactly, as states are float32. Sums are float32, in the order of the tokens, and
products are rounded before they are added: a token's result depends on nothing else than its own inputs and
those before it, wherever a sequence is cut into chunks.

The conv part of a state is the beginning of each of its parts, [kernel_size - 1, num_channels_of_part]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.state.layer_states import LayerStates
from workers.model.state.state_step import StateStep

# The channels that each part of a rank's states keeps, in order: a few runs of channels for each.
PartChannels = Sequence[Sequence[range]]


def equal_parts(num_channels: int, num_parts: int) -> PartChannels:
    """Return the channels of equal parts, each of which keeps others."""
    width = num_channels // num_parts
    return [[range(part * width, (part + 1) * width)] for part in range(num_parts)]


class CausalConv:
    """A depthwise convolution with one kernel for each channel of a rank."""

    def __init__(self, kernel: Tensor, bias: Tensor | None, parts: PartChannels | None = None) -> None:
        """`kernel` float32 [num_channels, kernel_size], whose last column multiplies the token itself, and
        `bias` [num_channels]. `parts` are the channels that the parts of a state keep; None: equal parts."""
        self._taps = kernel.t().contiguous()
        self._bias = bias
        self._channels: Tensor | None = None
        if parts is not None:
            channels = [[it for run in runs for it in run] for runs in parts]
            self._channels = torch.tensor(channels, device=kernel.device)
            self._places = _first_places(self._channels, len(kernel))
        self.num_before = len(self._taps) - 1

    def convolve(self, x: Tensor, states: LayerStates) -> Tensor:
        """Convolve `x` [num_tokens, num_channels], and leave the last inputs of each sequence in its state.
        Returns float32 [num_tokens, num_channels]."""
        blocks, step = states
        before = self._read(blocks, step)
        if step.is_decode:
            inputs = torch.cat((before, x.float()[:, None]), 1)
            self._write(blocks, step, inputs[:, 1:])
            return self._sum([inputs[:, tap] for tap in range(len(self._taps))])
        return self._convolve_rows(x, before, blocks, step)

    def _convolve_rows(self, x: Tensor, before: Tensor, blocks: Tensor, step: StateStep) -> Tensor:
        """Convolve sequences of several tokens: their rows stand behind those that came before."""
        lengths = torch.from_numpy(step.lengths).to(x.device, torch.int64)
        num_before, ends = self.num_before, lengths.cumsum(0)
        shifts = num_before * torch.arange(1, len(lengths) + 1, device=x.device)
        rows = torch.arange(len(x), device=x.device) + shifts.repeat_interleave(lengths)
        inputs = before.new_empty(len(x) + before[..., 0].numel(), x.shape[1])
        last = torch.arange(num_before, device=x.device)
        firsts = ends - lengths + shifts - num_before
        inputs[(firsts[:, None] + last).flatten()] = before.flatten(0, 1)
        inputs[rows] = x.float()
        self._write(blocks, step, inputs[(ends + shifts - num_before)[:, None] + last])
        return self._sum([inputs[rows - num_before + tap] for tap in range(len(self._taps))])

    def _sum(self, inputs: list[Tensor]) -> Tensor:
        """Add up the products of inputs [num_tokens, num_channels], one for each column of the kernel."""
        total = inputs[0] * self._taps[0]
        for its, tap in zip(inputs[1:], self._taps[1:], strict=True):
            total += its * tap
        return total if self._bias is None else total.add_(self._bias)

    def _read(self, blocks: Tensor, step: StateStep) -> Tensor:
        """Return the last inputs of each sequence, zeros of one that begins, [num_sequences, num_before,
        num_channels]."""
        reads, _ = step.on(blocks.device)
        num_parts, size = self._part_shape(blocks.shape[1])
        kept = blocks[reads.clamp(min=0), :, : self.num_before * size]
        kept = kept.masked_fill((reads < 0)[:, None, None], 0.0)
        by_token = kept.view(-1, num_parts, self.num_before, size).transpose(1, 2).flatten(2)
        if self._channels is None:
            return by_token
        return by_token.index_select(2, self._places)

    def _write(self, blocks: Tensor, step: StateStep, inputs: Tensor) -> None:
        """Leave the last inputs [num_sequences, num_before, num_channels] of each sequence in its block."""
        _, writes = step.on(blocks.device)
        if self._channels is not None:
            inputs = inputs.index_select(2, self._channels.flatten())
        by_part = (
            inputs.view(*inputs.shape[:2], *self._part_shape(blocks.shape[1])).transpose(1, 2).flatten(2)
        )
        blocks[writes, :, : by_part.shape[2]] = by_part

    def _part_shape(self, num_parts: int) -> tuple[int, int]:
        """Return how many parts there are, and the channels of each."""
        num_channels = self._taps.shape[1] if self._channels is None else self._channels.numel()
        return num_parts, num_channels // num_parts


def _first_places(channels: Tensor, num_channels: int) -> Tensor:
    """Return the place of each channel among those of all parts, [num_parts, num_channels_of_part], the first
    where several keep it."""
    listed = channels.flatten()
    places = torch.full((num_channels,), len(listed), device=listed.device)
    order = torch.arange(len(listed), device=listed.device)
    return places.scatter_reduce_(0, listed, order, "amin")
