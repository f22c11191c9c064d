"""A rank's experts with slots behind them, into which experts of other ranks can be copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.experts.copy_slots import CopySlots
from workers.model.experts.expert_products import CopyableExperts, Experts, ExpertWeights
from workers.model.experts.stored_experts import ReadWhenTaken


class CopiedExperts:
    """The experts of a layer that a rank owns, and those that it has copies of.

    `slots` say what is where, at this rank and at the others. An expert travels in the layout that the
    kernels use, so that a copy is no work beyond moving its bytes."""

    def __init__(self, experts: Experts, owned: range, slots: CopySlots, counts: Tensor) -> None:
        """Take `experts` with the slots behind those that are `owned`. `counts` are the tokens of both, on
        the device."""
        assert isinstance(experts, CopyableExperts)
        self.slots = slots
        self._experts, self._owned, self._counts = experts, owned, counts
        self.device = counts.device

    @property
    def num_bytes(self) -> int:
        """The bytes of one expert."""
        return sum(it.nbytes for it in self._experts.memory(0))

    def read(self, expert: int) -> Tensor:
        """Return an expert that the rank owns, as uint8 [num_bytes]."""
        return torch.cat([_bytes(it) for it in self._experts.memory(expert - self._owned.start)])

    def write(self, slot: int, packed: Tensor) -> None:
        """Overwrite a slot by an expert that another rank has read."""
        memory = [_bytes(it) for it in self._experts.memory(len(self._owned) + slot)]
        for own, copied in zip(memory, torch.split(packed, [len(it) for it in memory]), strict=True):
            own.copy_(copied)

    def note(self, part: int, slot: int, expert: int) -> None:
        """Note that the ranks of a part now have a copy of an expert in a slot, or none (-1). Rows are
        divided anew from here on."""
        self.slots.change(part, slot, expert, self._counts)


def with_slots(weights: ExpertWeights, num_slots: int) -> ExpertWeights:
    """Return the weights with `num_slots` more experts, which nobody may use before they are overwritten."""
    num_owned = len(weights.ups)

    def more(of_all: Sequence[Tensor]) -> ReadWhenTaken[Tensor]:
        return ReadWhenTaken(num_owned + num_slots, lambda it: of_all[it if it < num_owned else 0])

    gate_up_bias, down_bias = (
        None if bias is None else torch.cat((bias, bias[:1].expand(num_slots, -1)))
        for bias in (weights.gate_up_bias, weights.down_bias)
    )
    return dataclasses.replace(
        weights,
        gates=more(weights.gates) if weights.gates else (),
        ups=more(weights.ups),
        downs=more(weights.downs),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def _bytes(memory: Tensor) -> Tensor:
    return memory.view(-1).view(torch.uint8)
