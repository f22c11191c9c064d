"""The interface of layers that keep a recurrent state: what happens between their two products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from workers.model.state.state_step import StateStep


class LayerStates(NamedTuple):
    """The states of one layer, float32 `blocks` [num_blocks, num_parts, part_size] of the parts that a rank
    holds, whose rows may be apart; and which of them the sequences of a step continue and leave."""

    blocks: Tensor
    step: StateStep


class StateMixer(ABC):
    """Mixes the tokens of each sequence of a step by its state."""

    @abstractmethod
    def mix(self, projected: Tensor, states: LayerStates) -> Tensor:
        """Mix the product of the hidden states, `projected` [num_tokens, num_projected], which may be
        overwritten, and leave the states behind each sequence's last token in their blocks. Returns
        [num_tokens, num_mixed] of the same dtype."""
