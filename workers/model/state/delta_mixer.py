"""Mix tokens by the gated delta rule, behind a short convolution."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from workers.model import cuda, native
from workers.model.state import native_delta
from workers.model.state.convolve import make_convolve
from workers.model.state.delta_rule import DeltaRows, DeltaWeights, run_delta_rule
from workers.model.state.delta_shape import DeltaHeads
from workers.model.state.layer_states import LayerStates
from workers.model.state.native_conv import NativeConv
from workers.model.state.native_delta import NativeDeltaRule
from workers.model.state.packed_mixer import PackedMixer
from workers.model.state.state_mixer import StateMixer
from workers.model.state.state_step import StateStep

# Compute a step's outputs, as `run_delta_rule` describes it.
_RunRule = Callable[[DeltaRows, Tensor, StateStep], Tensor]


class DeltaMixer(StateMixer):
    """The value heads of a layer that a rank holds: channels are convolved, rounded, activated by SiLU and
    rounded, and are then the queries, keys and values of the gated delta rule."""

    def __init__(
        self,
        heads: DeltaHeads,
        kernel: Tensor,
        weights: DeltaWeights,
        dtype: torch.dtype,
        *,
        is_deterministic: bool,
    ) -> None:
        """`kernel` float32 [num_channels, kernel_size] is that of the convolution, `dtype` that of the
        tokens."""
        self._heads = heads
        self._num_kept = (kernel.shape[1] - 1) * heads.channels_per_key
        self._convolve = make_convolve(kernel, None, dtype, is_activated=True)
        self._run = _rule(heads, weights, dtype, is_deterministic=is_deterministic)

    def packed(self) -> PackedMixer | None:
        if not isinstance(self._convolve, NativeConv) or not isinstance(self._run, NativeDeltaRule):
            return None
        return PackedMixer(self._convolve, delta=self._run)

    def mix(self, projected: Tensor, states: LayerStates) -> Tensor:
        heads = self._heads
        widths = [heads.num_channels, heads.num_values, heads.num_value_heads, heads.num_value_heads]
        channels, *others = torch.split(projected, widths, dim=1)
        rows = DeltaRows(self._convolve(channels, states), *others)
        return self._run(rows, self._matrices(states.blocks), states.step)

    def _matrices(self, blocks: Tensor) -> Tensor:
        """Return the states of value heads, a view [num_blocks, num_parts, heads_per_part, key_dim,
        value_dim] of `blocks`, whose parts begin with those of the convolution."""
        heads, (num_blocks, num_parts, _) = self._heads, blocks.shape
        num_kept = self._num_kept * (heads.num_key_heads // num_parts)
        shape = num_blocks, num_parts, heads.num_value_heads // num_parts, heads.key_dim, heads.value_dim
        return blocks[:, :, num_kept:].view(shape)


def _rule(
    heads: DeltaHeads, weights: DeltaWeights, dtype: torch.dtype, *, is_deterministic: bool
) -> _RunRule:
    device = weights.rates.device
    if cuda.serves(device):
        from workers.model.state.triton_delta import TritonDeltaRule

        return TritonDeltaRule(heads, weights, is_deterministic=is_deterministic)
    if native_delta.serves(device, dtype, heads):
        kernels = native.load()
        assert kernels is not None
        return NativeDeltaRule(kernels, heads, weights, dtype, is_deterministic=is_deterministic)
    return functools.partial(run_delta_rule, heads, weights, is_deterministic=is_deterministic)
