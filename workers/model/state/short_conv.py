"""Mix tokens by a short convolution of gated channels."""

from __future__ import annotations

from torch import Tensor

from workers.model.state.causal_conv import CausalConv
from workers.model.state.state_mixer import LayerStates, StateMixer


class ShortConv(StateMixer):
    """Convolves channels times a gate, and multiplies the result by another gate. Both products are rounded
    to the model's dtype, and so is the result of the convolution."""

    def __init__(self, kernel: Tensor, bias: Tensor | None) -> None:
        """`kernel` float32 [num_channels, kernel_size], `bias` [num_channels]."""
        self._conv = CausalConv(kernel, bias)

    def mix(self, projected: Tensor, states: LayerStates) -> Tensor:
        gate, out_gate, channels = projected.chunk(3, dim=1)
        convolved = self._conv.convolve(gate * channels, states)
        return out_gate * convolved.to(projected.dtype)
