"""A rank's experts with slots behind them, into which experts of other ranks can be copied."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.experts.copy_slots import CopySlots
from workers.model.experts.expert_products import (
    ExpertRows,
    Experts,
    ExpertWeights,
    ReadableExperts,
    ReplaceableExperts,
)
from workers.model.experts.stored_experts import ReadWhenTaken


class _Piece(NamedTuple):
    """A tensor of `ExpertRows`: its shape, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CopiedExperts:
    """The experts of a layer that a rank owns, and those that it has copies of.

    `slots` say what is where, at this rank and at the others. An expert travels as the bytes of its
    `ExpertRows`, one after another."""

    def __init__(
        self, experts: Experts, weights: ExpertWeights, owned: range, slots: CopySlots, counts: Tensor
    ) -> None:
        """Take `experts` made of `weights` and the slots. `counts` are the tokens of both, on the device."""
        assert isinstance(experts, ReadableExperts)
        assert isinstance(experts, ReplaceableExperts)
        self.slots = slots
        self._readable: ReadableExperts = experts
        self._replaceable: ReplaceableExperts = experts
        self._owned, self._counts = owned, counts
        self.device = counts.device
        first = weights.gates[0]
        size, hidden_size = first.shape
        biases = (weights.gate_up_bias, weights.down_bias)
        self._pieces = [
            _Piece((2 * size, hidden_size), first.dtype),
            _Piece((hidden_size, size), first.dtype),
            *(None if it is None else _Piece((it.shape[1],), it.dtype) for it in biases),
        ]

    @property
    def num_bytes(self) -> int:
        """The bytes of one expert."""
        return sum(it.num_bytes for it in self._pieces if it is not None)

    def read(self, expert: int) -> Tensor:
        """Return an expert that the rank owns, as uint8 [num_bytes]."""
        rows = self._readable.rows(expert - self._owned.start)
        return torch.cat([it.contiguous().view(-1).view(torch.uint8) for it in rows if it is not None])

    def write(self, slot: int, packed: Tensor) -> None:
        """Overwrite a slot by an expert that another rank has read."""
        pieces: list[Tensor | None] = []
        start = 0
        for piece in self._pieces:
            if piece is None:
                pieces.append(None)
                continue
            # A clone is aligned for its dtype, whatever precedes it.
            of_piece = packed[start : start + piece.num_bytes].clone()
            pieces.append(of_piece.view(piece.dtype).view(piece.shape))
            start += piece.num_bytes
        gate_up, down, *biases = pieces
        assert gate_up is not None
        assert down is not None
        self._replaceable.replace(len(self._owned) + slot, ExpertRows(gate_up, down, *biases))

    def note(self, part: int, slot: int, expert: int) -> None:
        """Note that the ranks of a part now have a copy of an expert in a slot, or none (-1). Rows are
        divided anew from here on."""
        self.slots.change(part, slot, expert, self._counts)


def with_slots(weights: ExpertWeights, num_slots: int) -> ExpertWeights:
    """Return the weights with `num_slots` more experts, which nobody may use before they are overwritten."""
    num_owned = len(weights.gates)

    def more(of_all: Sequence[Tensor]) -> ReadWhenTaken:
        return ReadWhenTaken(num_owned + num_slots, lambda it: of_all[it if it < num_owned else 0])

    gate_up_bias, down_bias = (
        None if bias is None else torch.cat((bias, bias[:1].expand(num_slots, -1)))
        for bias in (weights.gate_up_bias, weights.down_bias)
    )
    return dataclasses.replace(
        weights,
        gates=more(weights.gates),
        ups=more(weights.ups),
        downs=more(weights.downs),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
