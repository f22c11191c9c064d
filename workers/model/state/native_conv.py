"""Convolve channels by the CPU kernel of `native/causal_conv.h`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.model import native
from workers.model.state.causal_conv import PartChannels, equal_parts
from workers.model.state.layer_states import LayerStates
from workers.model.state.native_states import StateBlocks, StateSequences


class ConvLayer(ctypes.Structure):
    """`ConvLayer` of `native/causal_conv.h`."""

    _fields_ = (
        ("taps", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_taps", "num_channels", "is_bf16", "is_activated")),
        ("segments", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_segments", "num_computed")),
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
        # By the number of parts of a state, and the distance between them; with the segments of each.
        self._form_to_layer: dict[tuple[int, int], tuple[ConvLayer, ctypes.Array[_Segment]]] = {}
        self._run = kernels.library.tandem_convolve
        self._run.argtypes = [*(ctypes.c_void_p,) * 4, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        self.dtype = dtype
        # Kept as long as the kernel reads them.
        self._taps = kernel.t().contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        num_taps, self.num_channels = self._taps.shape
        self._num_before = num_taps - 1
        assert self._taps.dtype == torch.float32
        assert num_taps <= kernels.library.tandem_most_taps(), "a longer convolution needs larger arrays"
        self._fixed = (
            self._taps.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            num_taps,
            self.num_channels,
            dtype == torch.bfloat16,
            is_activated,
        )

    def __call__(self, x: Tensor, states: LayerStates) -> Tensor:
        """Convolve `x` [num_tokens, num_channels], and leave the last inputs of each sequence in its
        state."""
        blocks, step = states
        assert x.dtype == self.dtype
        assert x.shape == (step.lengths.sum(), self.num_channels)
        assert x.stride(1) == 1
        out = torch.empty(x.shape, dtype=x.dtype)
        of_states = StateBlocks.of(blocks), StateSequences.of(step)
        arguments = (self.layer_over(blocks), *of_states)
        addresses = map(ctypes.addressof, arguments)
        self._run(*addresses, x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0))
        return out

    def num_kept(self, num_parts: int) -> int:
        """Return the elements that each of so many parts of a state has of the convolution."""
        parts = self._parts or equal_parts(self.num_channels, num_parts)
        return self._num_before * sum(map(len, parts[0]))

    def layer_over(self, blocks: Tensor) -> ConvLayer:
        """Return the kernel's arguments of the layer over these states, which hold while this object
        lives."""
        form = blocks.shape[1], blocks.stride(1)
        if form not in self._form_to_layer:
            segments, num_computed = self._segments(*form)
            layer = ConvLayer(*self._fixed, ctypes.addressof(segments), len(segments), num_computed)
            self._form_to_layer[form] = layer, segments
        return self._form_to_layer[form][0]

    def _segments(self, num_parts: int, part_stride: int) -> tuple[ctypes.Array[_Segment], int]:
        """Return where the parts of a state keep which channels, and how many of these segments are no copies
        of others."""
        parts = self._parts or equal_parts(self.num_channels, num_parts)
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
        assert sum(segment.width for segment in computed) == self.num_channels
        all_segments = [*computed, *copies]
        return (_Segment * len(all_segments))(*all_segments), len(computed)
