"""Mix tokens by a short convolution of gated channels."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model import native
from workers.model.state.convolve import make_convolve
from workers.model.state.layer_states import LayerStates
from workers.model.state.native_conv import NativeConv
from workers.model.state.packed_mixer import PackedMixer
from workers.model.state.state_mixer import StateMixer


class ShortConv(StateMixer):
    """Convolves channels times a gate, and multiplies the result by another gate. Both products are rounded
    to the model's dtype, and so is the result of the convolution."""

    def __init__(self, kernel: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """`kernel` float32 [num_channels, kernel_size], `bias` [num_channels]; `dtype` is that of tokens."""
        self._convolve = make_convolve(kernel, bias, dtype)

    def packed(self) -> PackedMixer | None:
        return PackedMixer(self._convolve) if isinstance(self._convolve, NativeConv) else None

    def mix(self, projected: Tensor, states: LayerStates) -> Tensor:
        gate, out_gate, channels = projected.chunk(3, dim=1)
        return _multiply(self._convolve(_multiply(gate, channels), states), out_gate)


def _multiply(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply x [num_tokens, num_channels], in place, by factors of the same shape."""
    kernels = native.load() if native.serves(x.device, x.dtype) else None
    return x.mul_(factors) if kernels is None else kernels.multiply_by(x, factors)
