"""The weights of layers that keep a recurrent state, and the interface of their readers."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch

from workers.model.linear_weights import LinearWeights
from workers.model.state.state_mixer import StateMixer


@dataclasses.dataclass(frozen=True, slots=True)
class StateWeights(ABC):
    """The weights of one layer: the rows of the products of the hidden states, whose outputs lie one after
    another, and the columns of that of what the layer mixes, both of the parts of the state that the rank
    holds. `dtype` is that of activations."""

    inputs: tuple[LinearWeights, ...]
    output: LinearWeights
    dtype: torch.dtype

    @abstractmethod
    def make_mixer(self, *, is_deterministic: bool) -> StateMixer:
        """Return what mixes tokens between the two products. `is_deterministic`: a token's result shall
        depend neither on the other sequences of a step nor on its chunks."""


class StateWeightReader(ABC):
    """Reads layers with a state for one rank."""

    @abstractmethod
    def layer(self, prefix: str) -> StateWeights:
        """Read the layer whose tensors of this kind begin with `prefix`."""
