"""Describe the recurrent state that some layers of a model keep. No torch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

from workers.model.latent_shape import ProductShape


@dataclasses.dataclass(frozen=True, slots=True)
class StateShape(ABC):
    """Represents the layers of a model that keep a state, which are all alike, and those that attend. A layer
    may do neither. Both are numbers of layers of the model, ascending.

    The state of a layer is a row of float32 elements that is divided into equal parts, one for each KV head
    of the model, so that ranks divide states as they divide KV: what a part holds, its kind of layer says.
    What several parts need, each has a copy of."""

    layers: tuple[int, ...]
    attending: tuple[int, ...]

    def keeps_state(self, layer: int) -> bool:
        """Whether a layer keeps a state."""
        return _is_in(self.layers, layer)

    def attends(self, layer: int) -> bool:
        """Whether a layer attends."""
        return _is_in(self.attending, layer)

    @abstractmethod
    def part_size(self, num_parts: int) -> int:
        """Return the elements of a layer's state in each of `num_parts` equal parts.

        Raises ValueError, saying what does not divide, where there are no such parts."""

    @abstractmethod
    def products(self, hidden_size: int) -> list[ProductShape]:
        """Return the products of a layer, of all ranks together: that of the hidden states, and that of what
        the layer mixes."""

    @abstractmethod
    def num_scratch(self, held: range, num_parts: int) -> int:
        """Return the float32 elements that a token takes while a layer mixes, at a rank that holds these
        parts."""

    def kept_share(self, name: str, held: range, num_parts: int) -> float:
        """Return the part of a tensor that a rank with these parts keeps; `name` is that within the layer's
        block, such as `in_proj.weight`."""
        return len(held) / num_parts


def _is_in(ascending: Sequence[int], number: int) -> bool:
    place = bisect_left(ascending, number)
    return place < len(ascending) and ascending[place] == number
