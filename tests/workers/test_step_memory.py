"""What is made for one step of a rank is gone after it, or the rank grows for as long as it serves."""

from __future__ import annotations

import weakref

import torch

from workers.model.native import RotatedLayer, RotatedTokens


def test_the_arguments_of_kernels_are_freed_with_their_step() -> None:
    """A reference of ctypes that an object keeps to itself is a cycle that no garbage collector finds."""
    table, places = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int32)
    tokens = RotatedTokens.of(table, table, places, places)
    layer = RotatedLayer.of(torch.zeros(2, 1, 2, 1, 16, 16), 0, 2, None, None)
    references: list[weakref.ref[object]] = [weakref.ref(tokens), weakref.ref(layer)]
    del tokens, layer
    assert [reference() for reference in references] == [None, None]
