"""Run the gated delta rule by the CPU kernels of `native/delta_rule.h`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.model import native
from workers.model.state.delta_rule import DeltaRows, DeltaWeights
from workers.model.state.delta_shape import DeltaHeads
from workers.model.state.native_states import StateBlocks, StateSequences
from workers.model.state.state_step import StateStep

# Columns of a state are computed so many at a time.
_COLUMNS = 32


def serves(device: torch.device, dtype: torch.dtype, heads: DeltaHeads) -> bool:
    """Whether there are kernels for such heads."""
    return native.serves(device, dtype) and heads.value_dim % _COLUMNS == 0


class DeltaLayer(ctypes.Structure):
    """`DeltaLayer` of `native/delta_rule.h`."""

    _fields_ = (
        ("rates", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("norm", native.NormArguments),
        *(
            (name, ctypes.c_int64)
            for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "is_bf16", "is_single")
        ),
    )


class _Rows(ctypes.Structure):
    """`DeltaRows` of `native/delta_rule.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in DeltaRows._fields),
        *((f"{name[:-1]}_stride", ctypes.c_int64) for name in DeltaRows._fields),
    )


class NativeDeltaRule:
    """The value heads of one layer, as `run_delta_rule` computes them up to rounding. `is_deterministic`:
    each token is computed as if it came alone."""

    def __init__(
        self,
        kernels: native.Kernels,
        heads: DeltaHeads,
        weights: DeltaWeights,
        dtype: torch.dtype,
        *,
        is_deterministic: bool = False,
    ) -> None:
        self._run = kernels.library.tandem_run_delta_rule
        self._run.argtypes = [*(ctypes.c_void_p,) * 5, ctypes.c_int64]
        self._heads, self._dtype = heads, dtype
        # Kept as long as the kernels read them.
        self._weights = weights
        for values in (weights.rates, weights.biases):
            assert values.dtype == torch.float32
            assert values.is_contiguous()
            assert len(values) == heads.num_value_heads
        assert heads.value_dim % _COLUMNS == 0
        self.layer = DeltaLayer(
            weights.rates.data_ptr(),
            weights.biases.data_ptr(),
            native.NormArguments.of(weights.norm, heads.value_dim),
            heads.num_key_heads,
            heads.num_value_heads,
            heads.key_dim,
            heads.value_dim,
            dtype == torch.bfloat16,
            is_deterministic,
        )

    def __call__(self, rows: DeltaRows, states: Tensor, step: StateStep, out: Tensor | None = None) -> Tensor:
        """Compute a step's outputs [num_tokens, num_value_heads * value_dim], written to `out` where it is
        given; `states` are as in `run_delta_rule`."""
        heads = self._heads
        num_tokens = len(rows.channels)
        widths = (heads.num_channels, heads.num_value_heads * heads.value_dim, *(heads.num_value_heads,) * 2)
        for it, width in zip(rows, widths, strict=True):
            assert it.dtype == self._dtype
            assert it.shape == (num_tokens, width)
            assert it.stride(1) == 1
        num_parts, heads_per_part = states.shape[1:3]
        assert states.shape[3:] == (heads.key_dim, heads.value_dim)
        assert num_parts * heads_per_part == heads.num_value_heads
        assert num_tokens == step.lengths.sum()
        if out is None:
            out = torch.empty(rows.gates.shape, dtype=self._dtype)
        assert out.stride(1) == 1
        given = _Rows(*(it.data_ptr() for it in rows), *(it.stride(0) for it in rows))
        arguments = self.layer, given, StateBlocks.of(states), StateSequences.of(step)
        self._run(*map(ctypes.addressof, arguments), out.data_ptr(), out.stride(0))
        return out
