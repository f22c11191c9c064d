"""The bytes that a weight has in memory, by the part of the model that it belongs to."""

from __future__ import annotations

from typing import NamedTuple


class WeightBytes(NamedTuple):
    """The mean bytes of a weight: of the layers but for their experts, of experts, and of the head. With
    scales and offsets where weights are quantized."""

    layers: float
    experts: float
    head: float

    @staticmethod
    def of_floats(item_bytes: float) -> WeightBytes:
        """Return those of weights that all have `item_bytes`."""
        return WeightBytes(item_bytes, item_bytes, item_bytes)
