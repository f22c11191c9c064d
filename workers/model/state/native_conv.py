"""Convolve channels by the CPU kernel of `native/causal_conv.h`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.model import native
from workers.model.state.state_mixer import LayerStates


class _Step(ctypes.Structure):
    """`ConvStep` of `native/causal_conv.h`."""

    _fields_ = (
        ("taps", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_taps", "num_channels", "is_bf16", "is_activated")),
        ("states", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_stride", "part_stride", "num_parts")),
        *((name, ctypes.c_void_p) for name in ("reads", "writes", "lengths")),
        ("num_sequences", ctypes.c_int64),
    )


class NativeConv:
    """The convolution of `CausalConv` with equal parts, whose results are rounded to the dtype of the
    channels; with `is_activated`, their SiLU is computed and rounded as well."""

    def __init__(
        self,
        kernels: native.Kernels,
        kernel: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        is_activated: bool,
    ) -> None:
        """`kernel` float32 [num_channels, kernel_size] and `bias` [num_channels] are as in `CausalConv`,
        `dtype` is that of the channels."""
        self._run = kernels.library.tandem_convolve
        self._run.argtypes = [*(ctypes.c_void_p,) * 2, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        self._dtype = dtype
        # Kept as long as the kernel reads them.
        self._taps = kernel.t().contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self._num_taps, self._num_channels = self._taps.shape
        assert self._taps.dtype == torch.float32
        assert self._num_taps <= kernels.library.tandem_most_taps(), (
            "a longer convolution needs larger arrays"
        )
        self._fixed = (
            self._taps.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self._num_taps,
            self._num_channels,
            dtype == torch.bfloat16,
            is_activated,
        )

    def __call__(self, x: Tensor, states: LayerStates) -> Tensor:
        """Convolve `x` [num_tokens, num_channels], and leave the last inputs of each sequence in its
        state."""
        blocks, step = states
        num_parts = blocks.shape[1]
        assert x.dtype == self._dtype
        assert x.shape == (step.lengths.sum(), self._num_channels)
        assert x.stride(1) == blocks.stride(2) == 1
        assert blocks.dtype == torch.float32
        assert self._num_channels % num_parts == 0
        assert all(it.flags.c_contiguous for it in (step.reads, step.writes, step.lengths))
        out = torch.empty(x.shape, dtype=x.dtype)
        arguments = _Step(
            *self._fixed,
            blocks.data_ptr(),
            blocks.stride(0),
            blocks.stride(1),
            num_parts,
            *(it.ctypes.data for it in (step.reads, step.writes, step.lengths)),
            len(step.lengths),
        )
        self._run(ctypes.addressof(arguments), x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0))
        return out
