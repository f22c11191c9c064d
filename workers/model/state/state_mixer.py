"""The interface of layers that keep a recurrent state: what happens between their two products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from workers.model.state.layer_states import LayerStates
from workers.model.state.packed_mixer import PackedMixer


class StateMixer(ABC):
    """Mixes the tokens of each sequence of a step by its state."""

    @property
    def num_summed(self) -> int:
        """The float32 columns that ranks which share the layer add up for each token meanwhile; 0: none."""
        return 0

    def join(self, all_reduce: Callable[[Tensor], None], tp: int) -> None:
        """Compute with the other of `tp` ranks, which have the other parts of the state: `all_reduce` adds up
        over them what no rank has whole. Called once, before the first step. Most kinds of layers need
        nothing of each other's parts."""
        assert tp > 1

    def packed(self) -> PackedMixer | None:
        """Return what the CPU kernels take to mix within one call for the whole layer; None where they
        cannot."""
        return None

    @abstractmethod
    def mix(self, projected: Tensor, states: LayerStates) -> Tensor:
        """Mix the product of the hidden states, `projected` [num_tokens, num_projected], which may be
        overwritten, and leave the states behind each sequence's last token in their blocks. Returns
        [num_tokens, num_mixed] of the same dtype."""
