"""The choice of what convolves the channels of a layer with a state."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import cuda, native
from workers.model.state.causal_conv import CausalConv, PartChannels
from workers.model.state.layer_states import LayerStates
from workers.model.state.native_conv import NativeConv

# Convolve channels [num_tokens, num_channels], rounded to their dtype.
Convolve = Callable[[Tensor, LayerStates], Tensor]


def make_convolve(
    kernel: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    parts: PartChannels | None = None,
    *,
    is_activated: bool = False,
) -> Convolve:
    """Return the convolution of `CausalConv` for channels of this dtype, by a kernel where there is one; with
    `is_activated`, the SiLU of its results, rounded once more."""
    if cuda.serves(kernel.device):
        from workers.model.state.triton_conv import TritonConv

        return TritonConv(kernel, bias, parts, is_activated=is_activated)
    if native.serves(kernel.device, dtype):
        kernels = native.load()
        assert kernels is not None
        return NativeConv(kernels, kernel, bias, dtype, is_activated=is_activated, parts=parts)
    conv = CausalConv(kernel, bias, parts)

    def convolve(channels: Tensor, states: LayerStates) -> Tensor:
        convolved = conv.convolve(channels, states).to(channels.dtype)
        return F.silu(convolved) if is_activated else convolved

    return convolve
