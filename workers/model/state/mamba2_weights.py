"""Read a rank's part of layers of Mamba-2."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from workers.model.split_products import ProductRows, SplitProducts, fused_rows
from workers.model.state.gated_norm import GatedNorm, NormGroups
from workers.model.state.mamba2 import Mamba2
from workers.model.state.mamba2_shape import Mamba2Shape
from workers.model.state.state_weights import StateWeightReader, StateWeights


@dataclasses.dataclass(frozen=True, slots=True)
class Mamba2Weights(StateWeights):
    """The weights of a layer: `input` has the rows of the gates, of the channels of heads, of both kinds of
    channels of groups, and of the time steps. `kernel` float32 [num_channels, kernel_size] and `conv_bias`
    [num_channels] are of the convolved channels; `step_bias`, `decay_log` and `skip` float32 [num_heads] of
    heads; `norm` float32 [num_heads * head_dim] of the norm of what they give."""

    kernel: Tensor
    conv_bias: Tensor | None
    step_bias: Tensor
    decay_log: Tensor
    skip: Tensor
    norm: Tensor
    shape: Mamba2Shape
    held: range
    num_parts: int
    eps: float

    def make_mixer(self, *, is_deterministic: bool) -> Mamba2:
        shape = self.shape
        groups = NormGroups.of(shape.inner_size, shape.num_groups, self.held, self.num_parts)
        return Mamba2(
            shape,
            self.held,
            self.num_parts,
            self.kernel,
            self.conv_bias,
            (self.step_bias, self.decay_log, self.skip),
            GatedNorm(self.norm, self.eps, groups),
            is_deterministic=is_deterministic,
        )


class Mamba2WeightReader(StateWeightReader):
    """Reads the heads of the parts of the state that a rank holds, and the groups that they belong to."""

    def __init__(
        self, products: SplitProducts, shape: Mamba2Shape, held: range, num_parts: int, eps: float
    ) -> None:
        self._products, self._shape, self._eps = products, shape, eps
        self._held, self._num_parts = held, num_parts
        size = shape.part_heads(num_parts)
        self._heads = slice(held.start * size, held.stop * size)
        self._inner = slice(self._heads.start * shape.head_dim, self._heads.stop * shape.head_dim)
        groups = shape.groups_of(held, num_parts)
        self._of_groups = slice(groups.start * shape.state_size, groups.stop * shape.state_size)

    def layer(self, prefix: str) -> Mamba2Weights:
        shape, products, inner = self._shape, self._products, self._inner
        num_inner, num_of_groups = shape.inner_size, shape.num_groups * shape.state_size
        heads = ProductRows("", num_inner, inner)
        groups = ProductRows("", num_of_groups, self._of_groups)
        steps = ProductRows("", shape.num_heads, self._heads)
        parts = fused_rows(f"{prefix}in_proj", [heads, heads, groups, groups, steps])
        conv = fused_rows(f"{prefix}conv1d", [heads, groups, groups])
        kernel = [
            products.floats(f"{it.name}.weight", (it.num_rows, 1, shape.kernel_size), it.rows) for it in conv
        ]
        bias = [
            products.floats(f"{it.name}.bias", (it.num_rows,), it.rows) for it in conv if shape.has_conv_bias
        ]
        step_bias, decay_log, skip = (
            products.floats(f"{prefix}{name}", (shape.num_heads,), self._heads)
            for name in ("dt_bias", "A_log", "D")
        )
        return Mamba2Weights(
            products.of_outputs(parts, has_bias=shape.has_bias),
            products.of_inputs(f"{prefix}out_proj", num_inner, inner, has_bias=shape.has_bias),
            torch.cat(kernel)[:, 0].contiguous(),
            torch.cat(bias) if bias else None,
            step_bias,
            decay_log,
            skip,
            products.floats(f"{prefix}norm.weight", (num_inner,), inner),
            shape,
            self._held,
            self._num_parts,
            self._eps,
        )
