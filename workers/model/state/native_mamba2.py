"""Scan tokens by the states of Mamba-2 with the CPU kernel of `native/mamba2.h`: token by token, so that
results depend neither on chunks nor on other sequences."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.model import native
from workers.model.state.layer_states import LayerStates
from workers.model.state.mamba2_scan import ScanHeads
from workers.model.state.native_states import StateBlocks, StateSequences


class ScanLayer(ctypes.Structure):
    """`ScanLayer` of `native/mamba2.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("step_bias", "decay", "skip", "groups")),
        *((name, ctypes.c_int64) for name in ("num_heads", "head_dim", "state_size", "num_groups")),
        ("is_bf16", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("least_step", "most_step")),
    )


class GroupNormArguments(ctypes.Structure):
    """`GroupNorm` of `native/state_mixer.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "widths")),
        ("num_groups", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("group_size", "eps")),
    )

    @staticmethod
    def of(weight: Tensor, widths: Tensor, group_size: int, eps: float) -> GroupNormArguments:
        """Describe a norm as `scale_groups` computes it. Weight and widths must live until the result is used
        no more."""
        assert weight.dtype == torch.float32
        assert weight.is_contiguous()
        assert len(weight) == widths.sum()
        return GroupNormArguments(weight.data_ptr(), widths.data_ptr(), len(widths), group_size, eps)


class NativeScan:
    """Does the same as `TorchScan`."""

    def __init__(self, kernels: native.Kernels, heads: ScanHeads, dtype: torch.dtype) -> None:
        """`dtype` is that of the tokens."""
        self._run = kernels.library.tandem_scan_mamba2
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [*(pointer,) * 4, size, pointer, size, pointer]
        self._heads, self._dtype = heads, dtype
        # Kept as long as the kernel reads them.
        self._of_heads = [it.float().contiguous() for it in (heads.step_bias, heads.decay, heads.skip)]
        self._groups = heads.groups.int()
        self.layer = ScanLayer(
            *(it.data_ptr() for it in (*self._of_heads, self._groups)),
            heads.num_heads,
            heads.head_dim,
            heads.state_size,
            heads.num_groups,
            dtype == torch.bfloat16,
            *heads.limits,
        )

    def __call__(self, convolved: Tensor, steps: Tensor, states: LayerStates) -> Tensor:
        """Scan tokens, as `TorchScan` describes it."""
        heads, (blocks, step) = self._heads, states
        num_tokens = int(step.lengths.sum())
        assert convolved.dtype == steps.dtype == self._dtype
        assert convolved.shape == (num_tokens, heads.num_channels)
        assert steps.shape == (num_tokens, heads.num_heads)
        assert convolved.stride(1) == steps.stride(1) == 1
        assert heads.num_heads % blocks.shape[1] == 0
        out = torch.empty(num_tokens, heads.inner_size, dtype=torch.float32)
        arguments = self.layer, StateBlocks.of(blocks, heads.num_kept), StateSequences.of(step)
        self._run(
            *map(ctypes.addressof, arguments), convolved.data_ptr(), convolved.stride(0), steps.data_ptr(),
            steps.stride(0), out.data_ptr(),
        )  # fmt: skip
        return out


def gate_and_square(kernels: native.Kernels, x: Tensor, gate: Tensor, widths: Tensor) -> Tensor:
    """Multiply float32 x [num_tokens, num_columns], in place, by the SiLU of `gate`. Returns the sums of the
    squares of groups of columns, [num_tokens, num_groups], which have these `widths` int64 [num_groups]."""
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    squares = torch.empty(len(x), len(widths), dtype=torch.float32)
    kernels.library.tandem_gate_and_square(
        _pointer(x), _pointer(gate), ctypes.c_int64(gate.stride(0)), ctypes.c_int64(len(x)),
        _pointer(widths), ctypes.c_int64(len(widths)), _pointer(squares),
        ctypes.c_int64(gate.dtype == torch.bfloat16),
    )  # fmt: skip
    return squares


def scale_groups(
    kernels: native.Kernels,
    x: Tensor,
    weight: Tensor,
    squares: Tensor,
    sizes: tuple[int, float],
    widths: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Scale each group of columns of x to unit mean square by the sums of `squares` [num_tokens, num_groups],
    and multiply by `weight`. `sizes` are the columns of a whole group, and what is added to the mean square.
    Returns a tensor of this dtype."""
    assert x.is_contiguous()
    assert squares.is_contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    group_size, eps = sizes
    kernels.library.tandem_scale_groups(
        _pointer(x), _pointer(weight), _pointer(squares), ctypes.c_float(group_size), ctypes.c_float(eps),
        ctypes.c_int64(len(x)), _pointer(widths), ctypes.c_int64(len(widths)), _pointer(out),
        ctypes.c_int64(dtype == torch.bfloat16),
    )  # fmt: skip
    return out


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
