"""Which states the sequences of a step continue, and where they leave them."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.attention.interface import StepInput, to_device

# In place of a block to continue from: the sequence begins, and its state is zero.
NO_STATE = -1


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceStates:
    """The same as in `StateStep`, int32 on a device [num_sequences], for the steps that a CUDA graph
    captures: each sequence has one new token."""

    reads: Tensor
    writes: Tensor


@dataclasses.dataclass(frozen=True)
class StateStep:
    """The sequences of a step, of which the i-th has the `lengths[i]` rows that follow those before. It reads
    the state in block `reads[i]`, `NO_STATE` where it begins, and leaves that behind its last new token in
    block `writes[i]`, which may be the same. Arrays are int32 [num_sequences].

    `device` says the same where the arrays were uploaded already."""

    reads: NDArray[np.int32]
    writes: NDArray[np.int32]
    lengths: NDArray[np.int32]
    device: DeviceStates | None = None

    @functools.cached_property
    def is_decode(self) -> bool:
        """Whether each sequence has one new token."""
        return bool((self.lengths == 1).all())

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the blocks that sequences read and write, int64 [num_sequences] on the device. They are
        uploaded once, for all layers."""
        if (found := self._uploaded.get(device)) is None:
            if self.device is not None:
                found = self.device.reads.long(), self.device.writes.long()
            else:
                found = to_device(self.reads, device).long(), to_device(self.writes, device).long()
            self._uploaded[device] = found
        return found

    @functools.cached_property
    def _uploaded(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    @staticmethod
    def of(step: StepInput) -> StateStep:
        """Return the states of a step whose tables are those of the layers with states: the state behind a
        token is in the block of the token."""
        last = step.starts + step.lengths - 1
        reads = step.tables[step.slots, np.maximum(step.starts - 1, 0) // step.block_tokens]
        reads = np.where(step.starts == 0, np.int32(NO_STATE), reads)
        writes = step.tables[step.slots, last // step.block_tokens]
        return StateStep(reads, writes, step.lengths, _on_device(step))


def _on_device(step: StepInput) -> DeviceStates | None:
    """Compute the same of what the device knows, so that a graph computes it anew in each step."""
    if (known := step.device) is None:
        return None
    starts = known.starts.long()
    tables, slots = known.tables, known.slots.long()
    before = tables[slots, (starts - 1).clamp(min=0) // step.block_tokens]
    reads = torch.where(starts == 0, NO_STATE, before)
    writes = tables[slots, (starts + known.lengths - 1) // step.block_tokens]
    return DeviceStates(reads.to(torch.int32), writes.to(torch.int32))
