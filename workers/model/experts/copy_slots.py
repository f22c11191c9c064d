"""Copies of a layer's experts at other ranks than those that own them, and the choice of who computes a row.

The ranks of a stage are divided into parts, each of which owns some experts. A part has slots for copies of
experts of other parts. The owner of an expert and the parts with a copy are the *holders* of the expert, and
each row that chooses the expert is computed by one of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.model.sizes import part

# The values of a row's choice. Each of up to six holders has an equal share of them, and more nearly so.
NUM_CHOICES = 60
# The columns of a row that decide, spread over all, and the factors of their bits: odd multiples of 2^64 over
# the golden ratio.
_NUM_COLUMNS = 16
_GOLDEN = 0x9E3779B97F4A7C15
_SIZE_TO_BITS = {2: torch.int16, 4: torch.int32}


class CopyPlace(NamedTuple):
    """The place of a rank among the `num_parts` parts of its stage, each with `num_slots` for copies in every
    layer."""

    part: int
    num_parts: int
    num_slots: int


class CopySlots:
    """The copies in the slots of all parts for one layer. All ranks of the stage make the same changes at the
    same steps, and so agree on who computes a row."""

    def __init__(self, num_experts: int, place: CopyPlace, device: torch.device) -> None:
        """Begin without copies."""
        self.place = place
        self._owned = [part(num_experts, number, place.num_parts) for number in range(place.num_parts)]
        self._slots = np.full((place.num_parts, place.num_slots), -1)
        shape = (num_experts, NUM_CHOICES)
        self._parts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._places = torch.zeros(shape, dtype=torch.int32, device=device)
        self._factors = torch.from_numpy(_factors()).to(device)
        # The counts of the rank's slots when their copies came, and the tokens of copies that are gone.
        self._first_counts = [0] * place.num_slots
        self._gone_tokens: dict[int, int] = {}
        for expert in range(num_experts):
            self._divide(expert)

    def owner(self, expert: int) -> int:
        """Return the part that owns an expert."""
        return next(number for number, owned in enumerate(self._owned) if expert in owned)

    def holders(self, expert: int) -> list[int]:
        """Return the parts that hold an expert, its owner first."""
        copies = np.flatnonzero((self._slots == expert).any(1))
        return [self.owner(expert), *copies.tolist()]

    def parts(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return the part that computes each row of x [num_rows, hidden_size] by each of its `experts`
        [num_rows, num_chosen]; int64."""
        return torch.take(self._parts, self._choices(x, experts))

    def places(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return the places of the same experts at this rank, its copies after its own, -1 where another part
        computes the row; int32."""
        return torch.take(self._places, self._choices(x, experts))

    def change(self, number: int, slot: int, expert: int, counts: Tensor) -> None:
        """Note that part `number` has a copy of `expert` in a slot, or none (-1). `counts` are the tokens of
        the rank's experts and copies until now."""
        before = int(self._slots[number, slot])
        if number == self.place.part:
            self._replace(slot, before, int(counts[len(self._owned[number]) + slot]))
        self._slots[number, slot] = expert
        for changed in {before, expert} - {-1}:
            self._divide(changed)

    def tokens(self, counts: Tensor) -> dict[int, int]:
        """Return the tokens of each expert that this rank has computed by copies until now, where `counts`
        are those of its experts and copies."""
        tokens = dict(self._gone_tokens)
        of_slots = counts[len(self._owned[self.place.part]) :].tolist()
        for expert, count, first in zip(self._own_slots, of_slots, self._first_counts, strict=True):
            if expert >= 0:
                tokens[expert] = tokens.get(expert, 0) + count - first
        return tokens

    @property
    def _own_slots(self) -> list[int]:
        found: list[int] = self._slots[self.place.part].tolist()
        return found

    def _replace(self, slot: int, before: int, count: int) -> None:
        if before >= 0:
            gone = self._gone_tokens
            gone[before] = gone.get(before, 0) + count - self._first_counts[slot]
        self._first_counts[slot] = count

    def _choices(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return the places in the tables. They depend on nothing but the bits of a row and its experts."""
        columns = x[:, :: -(-x.shape[1] // _NUM_COLUMNS)]
        bits = columns.view(_SIZE_TO_BITS[x.element_size()])
        keys = (bits * self._factors[: bits.shape[1]]).sum(1, keepdim=True)
        choices = keys.mul_(self._factors[-1]).bitwise_right_shift_(33).remainder_(NUM_CHOICES)
        return choices + experts * NUM_CHOICES

    def _divide(self, expert: int) -> None:
        """Divide the rows of an expert evenly among its holders."""
        holders = self.holders(expert)
        parts = np.resize(np.array(holders), NUM_CHOICES)
        place = self._place_of(expert) if self.place.part in holders else -1
        places = np.where(parts == self.place.part, place, -1).astype(np.int32)
        self._parts[expert].copy_(torch.from_numpy(parts))
        self._places[expert].copy_(torch.from_numpy(places))

    def _place_of(self, expert: int) -> int:
        owned = self._owned[self.place.part]
        return expert - owned.start if expert in owned else len(owned) + self._own_slots.index(expert)


def _factors() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    odd = np.arange(_NUM_COLUMNS + 1, dtype=np.uint64) * 2 + 1
    return (odd * np.uint64(_GOLDEN)).view(np.int64)
