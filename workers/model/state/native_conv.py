"""Convolve channels by the CPU kernel of `native/causal_conv.h`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.model import native
from workers.model.state.causal_conv import PartChannels, equal_parts
from workers.model.state.state_mixer import LayerStates


class _Step(ctypes.Structure):
    """`ConvStep` of `native/causal_conv.h`."""

    _fields_ = (
        ("taps", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_taps", "num_channels", "is_bf16", "is_activated")),
        ("segments", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_segments", "num_computed")),
        ("states", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("reads", "writes", "lengths")),
        ("num_sequences", ctypes.c_int64),
    )


class _Segment(ctypes.Structure):
    """`ConvSegment` of `native/causal_conv.h`."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("channel", "width", "place", "row_stride"))


class NativeConv:
    """The convolution of `CausalConv`, whose results are rounded to the dtype of the
    channels; with `is_activated`, their SiLU is computed and rounded as well."""

    def __init__(
        self,
        kernels: native.Kernels,
        kernel: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        is_activated: bool,
        parts: PartChannels | None = None,
    ) -> None:
        """`kernel` float32 [num_channels, kernel_size], `bias` [num_channels] and `parts` are as in
        `CausalConv`, `dtype` is that of the channels."""
        self._parts = parts
        # By the number of parts of a state, and the distance between them.
        self._form_to_segments: dict[tuple[int, int], tuple[ctypes.Array[_Segment], int]] = {}
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
        assert all(it.flags.c_contiguous for it in (step.reads, step.writes, step.lengths))
        out = torch.empty(x.shape, dtype=x.dtype)
        segments, num_computed = self._segments(num_parts, blocks.stride(1))
        arguments = _Step(
            *self._fixed,
            ctypes.addressof(segments),
            len(segments),
            num_computed,
            blocks.data_ptr(),
            blocks.stride(0),
            *(it.ctypes.data for it in (step.reads, step.writes, step.lengths)),
            len(step.lengths),
        )
        self._run(ctypes.addressof(arguments), x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0))
        return out

    def _segments(self, num_parts: int, part_stride: int) -> tuple[ctypes.Array[_Segment], int]:
        """Return where the parts of a state keep which channels, and how many of these segments are no copies
        of others."""
        known = self._form_to_segments.get((num_parts, part_stride))
        if known is not None:
            return known
        parts = self._parts or equal_parts(self._num_channels, num_parts)
        assert len(parts) == num_parts
        computed: list[_Segment] = []
        copies: list[_Segment] = []
        seen: set[int] = set()
        for part, runs in enumerate(parts):
            place, row_stride = part * part_stride, sum(map(len, runs))
            for run in runs:
                listed = copies if run.start in seen else computed
                listed.append(_Segment(run.start, len(run), place, row_stride))
                seen.add(run.start)
                place += len(run)
        assert sum(segment.width for segment in computed) == self._num_channels
        all_segments = [*computed, *copies]
        known = (_Segment * len(all_segments))(*all_segments), len(computed)
        self._form_to_segments[num_parts, part_stride] = known
        return known
