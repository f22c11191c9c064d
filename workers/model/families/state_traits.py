"""Declare the layers of a family that keep a recurrent state."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

from workers.model.config_values import ConfigValues
from workers.model.state.state_shape import StateShape


@dataclasses.dataclass(frozen=True, slots=True)
class StateTraits(ABC):
    """Represents one kind of layers with a state, and the keys of config.json that describe them. The names
    of their tensors begin with `block` within the layer."""

    block: str

    def num_layers(self, values: ConfigValues) -> int | None:
        """Return the number of layers where other keys than `num_hidden_layers` say it."""
        return None

    def expert_layers(self, values: ConfigValues, num_layers: int) -> tuple[int, ...]:
        """Return the layers that are experts alone; none in most families."""
        return ()

    @abstractmethod
    def read(self, values: ConfigValues, num_layers: int) -> StateShape | None:
        """Read the keys; None where no layer keeps a state. Raises `CheckpointError`, naming the key, for
        what is not supported."""
