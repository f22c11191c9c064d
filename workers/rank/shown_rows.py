"""Rows that a rank shows to others in a slot of memory that they share, a window of all rows at a time.

A slot begins with the sizes of the parts for every rank, their places among all that is shown one after
another, and the end of all, in bytes. The bytes of the window follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ShownRows(NamedTuple):
    """The parts of one rank for all ranks. `tensors` are their bytes, each at its place in `starts`;
    `header`, int64 [2 * num_ranks + 1], is the beginning of a slot."""

    tensors: list[Tensor]
    starts: list[int]
    header: Tensor

    @staticmethod
    def of(parts: Sequence[Tensor], own: int) -> ShownRows:
        """Put the parts one after another, without that of rank `own`, and once if several ranks get the same
        tensor."""
        tensors: list[Tensor] = []
        starts: list[int] = []
        places: list[int] = []
        id_to_place: dict[int, int] = {}
        end = 0
        for rank, part in enumerate(parts):
            if rank != own and id(part) not in id_to_place:
                id_to_place[id(part)] = end
                tensors.append(part.view(-1).view(torch.uint8))
                starts.append(end)
                end += part.nbytes
            places.append(id_to_place.get(id(part), end))
        sizes = [part.nbytes for part in parts]
        return ShownRows(tensors, starts, torch.tensor([*sizes, *places, end]))

    def write(self, slot: Tensor, start: int) -> None:
        """Write the header, and the window from `start` on as far as it fits into the slot."""
        slot[: self.header.nbytes].view(torch.int64).copy_(self.header)
        payload = slot[self.header.nbytes :]
        for tensor, place in zip(self.tensors, self.starts, strict=True):
            found = _overlap(range(place, place + len(tensor)), range(start, start + len(payload)))
            if found:
                part = tensor[found.start - place : found.stop - place]
                payload[found.start - start : found.stop - start].copy_(part)


class RowsWindow(NamedTuple):
    """The window of what a rank shows that begins at `start`: its bytes, and the sizes, places and end of the
    slot's header."""

    shown: Tensor
    start: int
    sizes: list[int]
    places: list[int]
    end: int

    @property
    def stop(self) -> int:
        return self.start + len(self.shown)

    @staticmethod
    def read(slot: Tensor, start: int, num_ranks: int) -> RowsWindow:
        """Read the beginning of a slot that holds the window from `start` on."""
        num_bytes = 8 * (2 * num_ranks + 1)
        *numbers, end = slot[:num_bytes].view(torch.int64).tolist()
        return RowsWindow(slot[num_bytes:], start, numbers[:num_ranks], numbers[num_ranks:], end)

    def empty_part(self, rank: int, like: Tensor) -> Tensor:
        """Allocate the part for a rank, whose columns and dtype are those of `like`."""
        num_rows = self.sizes[rank] // (like.shape[1] * like.element_size())
        return like.new_empty((num_rows, like.shape[1]))

    def copy(self, rank: int, into: Tensor) -> None:
        """Copy of the part for a rank as much as the window holds to its place in `into`."""
        flat, place = into.view(-1).view(torch.uint8), self.places[rank]
        found = _overlap(range(place, place + len(flat)), range(self.start, self.stop))
        if found:
            part = self.shown[found.start - self.start : found.stop - self.start]
            flat[found.start - place : found.stop - place].copy_(part)


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))
