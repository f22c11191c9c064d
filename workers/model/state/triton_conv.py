"""Convolve channels by the Triton kernels of `workers.model.cuda.state_conv`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.attention.interface import to_device
from workers.model.cuda.state_conv import ConvChannels, ConvRows, convolve
from workers.model.state.causal_conv import PartChannels, equal_parts
from workers.model.state.layer_states import LayerStates
from workers.model.state.state_step import StateStep


class TritonConv:
    """Does the same as `NativeConv`, on a device."""

    def __init__(
        self, kernel: Tensor, bias: Tensor | None, parts: PartChannels | None = None, *, is_activated: bool
    ) -> None:
        self._taps = kernel.t().contiguous()
        self._bias, self._parts, self._is_activated = bias, parts, is_activated
        self._form_to_channels: dict[tuple[int, int], ConvChannels] = {}

    def __call__(self, x: Tensor, states: LayerStates) -> Tensor:
        blocks, step = states
        channels = self._channels(blocks.shape[1], blocks.stride(1))
        return convolve(x, blocks, channels, rows_of(step, blocks.device))

    def _channels(self, num_parts: int, part_stride: int) -> ConvChannels:
        """Return where the parts of a state keep channels."""
        known = self._form_to_channels.get((num_parts, part_stride))
        if known is not None:
            return known
        num_channels = self._taps.shape[1]
        parts = self._parts or equal_parts(num_channels, num_parts)
        listed = [[channel for run in runs for channel in run] for runs in parts]
        kept = np.array(listed, dtype=np.int32)
        firsts = np.arange(num_parts, dtype=np.int32)[:, None] * np.int32(part_stride)
        places = firsts + np.arange(kept.shape[1], dtype=np.int32)
        homes = np.zeros(num_channels, dtype=np.int32)
        # The first place of a channel is written last.
        homes[kept.ravel()[::-1]] = places.ravel()[::-1]
        known = ConvChannels(
            self._taps,
            self._bias,
            self._uploaded(homes),
            self._uploaded(kept),
            self._uploaded(places),
            kept.shape[1],
            self._is_activated,
        )
        self._form_to_channels[num_parts, part_stride] = known
        return known

    def _uploaded(self, numbers: NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers.ravel().astype(np.int32)).to(self._taps.device)


def rows_of(step: StateStep, device: torch.device) -> ConvRows:
    """Return the rows of a step on the device, uploaded where they are not there yet."""
    if step.device is not None:
        reads, writes = step.device.reads, step.device.writes
    else:
        reads, writes = to_device(step.reads, device), to_device(step.writes, device)
    if step.is_decode:
        return ConvRows(reads, writes)
    firsts = (step.lengths.cumsum() - step.lengths).astype(np.int32)
    sequences = np.arange(len(firsts), dtype=np.int32).repeat(step.lengths)
    uploaded = (to_device(it, device) for it in (firsts, step.lengths, sequences))
    return ConvRows(reads, writes, *uploaded)
