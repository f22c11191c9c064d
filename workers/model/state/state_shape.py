"""Describe the recurrent state that some layers of a model keep. No torch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod


@dataclasses.dataclass(frozen=True, slots=True)
class StateShape(ABC):
    """Represents the layers of a model that keep a state, which are all alike, and those that attend. A layer
    may do neither. Both are numbers of layers of the model, ascending.

    The state of a layer is a row of float32 elements that is divided into equal parts, one for each KV head
    of the model, so that ranks divide states as they divide KV: what a part holds, its kind of layer says.
    What several parts need, each has a copy of."""

    layers: tuple[int, ...]
    attending: tuple[int, ...]

    @abstractmethod
    def part_size(self, num_parts: int) -> int:
        """Return the elements of a layer's state in each of `num_parts` equal parts.

        Raises ValueError, saying what does not divide, where there are no such parts."""
