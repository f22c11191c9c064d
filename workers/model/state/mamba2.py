"""Mix tokens by Mamba-2: convolved channels, a state of each head that decays, and a gated norm.

What is convolved is rounded to the model's dtype, activated and rounded again; all else is float32. For a
token with the time step d, the state h of a head [state_size, head_dim] becomes h * exp(d * a) + b ⊗ d * x,
and gives c · h + skip * x, with b and c of the head's group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workers.model import cuda, native
from workers.model.state.causal_conv import PartChannels
from workers.model.state.convolve import make_convolve
from workers.model.state.gated_norm import GatedNorm
from workers.model.state.layer_states import LayerStates
from workers.model.state.mamba2_scan import ScanHeads, TorchScan
from workers.model.state.native_conv import NativeConv
from workers.model.state.native_mamba2 import NativeScan
from workers.model.state.packed_mixer import PackedMixer
from workers.model.state.state_mixer import StateMixer

# Scan tokens, as `TorchScan` does.
_Scan = Callable[[Tensor, Tensor, LayerStates], Tensor]


class Mamba2(StateMixer):
    """The heads of a rank."""

    def __init__(
        self,
        heads: ScanHeads,
        kernel: Tensor,
        conv_bias: Tensor | None,
        parts: PartChannels,
        norm: GatedNorm,
        dtype: torch.dtype,
        *,
        is_deterministic: bool,
    ) -> None:
        """`kernel` float32 [num_channels, kernel_size], `conv_bias` [num_channels] and `parts` are those of
        the convolution, `dtype` that of the tokens."""
        self._norm = norm
        self._widths = [heads.inner_size, heads.num_channels, heads.num_heads]
        self._convolve = make_convolve(kernel, conv_bias, dtype, parts, is_activated=True)
        self._scan = _scan(heads, dtype, is_deterministic=is_deterministic)

    @property
    def num_summed(self) -> int:
        return self._norm.num_summed

    def join(self, all_reduce: Callable[[Tensor], None], tp: int) -> None:
        self._norm.join(all_reduce, tp)

    def packed(self) -> PackedMixer | None:
        if not isinstance(self._convolve, NativeConv) or not isinstance(self._scan, NativeScan):
            return None
        norm = self._norm.packed()
        return None if norm is None else PackedMixer(self._convolve, scan=self._scan, norm=norm)

    def mix(self, projected: Tensor, states: LayerStates) -> Tensor:
        gates, channels, steps = torch.split(projected, self._widths, 1)
        mixed = self._scan(self._convolve(channels, states), steps, states)
        return self._norm.normalize(mixed, gates)


def _scan(heads: ScanHeads, dtype: torch.dtype, *, is_deterministic: bool) -> _Scan:
    if cuda.serves(heads.decay.device):
        from workers.model.state.triton_mamba2 import TritonScan

        return TritonScan(heads, is_deterministic=is_deterministic)
    if native.serves(heads.decay.device, dtype):
        kernels = native.load()
        assert kernels is not None
        return NativeScan(kernels, heads, dtype)
    return TorchScan(heads, is_deterministic=is_deterministic)
