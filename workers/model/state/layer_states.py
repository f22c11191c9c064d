"""The states of one layer in a step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from workers.model.state.state_step import StateStep


class LayerStates(NamedTuple):
    """The states of one layer, float32 `blocks` [num_blocks, num_parts, part_size] of the parts that a rank
    holds, whose rows may be apart; and which of them the sequences of a step continue and leave."""

    blocks: Tensor
    step: StateStep
