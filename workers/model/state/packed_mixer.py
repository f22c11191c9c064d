"""Describe what mixes the tokens of a layer by a state to the CPU kernels, which run such a layer in one
call."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from workers.model.state.native_conv import NativeConv
from workers.model.state.native_delta import NativeDeltaRule
from workers.model.state.native_mamba2 import GroupNormArguments, NativeScan
from workers.model.state.native_states import StateBlocks


class MixerArguments(ctypes.Structure):
    """`StateMixer` of `native/state_mixer.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("conv", "delta", "scan", "norm")),
        ("blocks", StateBlocks),
        ("num_kept", ctypes.c_int64),
    )


class PackedMixer(NamedTuple):
    """The parts of a mixer by the kernels: its convolution, and what its channels are tokens of, the gated
    delta rule or Mamba-2, of which the heads' results are normalized by `norm`. With neither, channels are
    gated before and behind the convolution."""

    conv: NativeConv
    delta: NativeDeltaRule | None = None
    scan: NativeScan | None = None
    norm: GroupNormArguments | None = None

    def over(self, blocks: Tensor) -> MixerArguments:
        """Return the kernels' arguments for states in these blocks, [num_blocks, num_parts, part_size], which
        must live until the result is used no more, as must this object."""
        return MixerArguments(
            ctypes.addressof(self.conv.layer_over(blocks)),
            None if self.delta is None else ctypes.addressof(self.delta.layer),
            None if self.scan is None else ctypes.addressof(self.scan.layer),
            None if self.norm is None else ctypes.addressof(self.norm),
            StateBlocks.of(blocks),
            self.conv.num_kept(blocks.shape[1]),
        )
