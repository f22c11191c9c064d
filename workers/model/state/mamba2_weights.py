"""Read a rank's part of layers of Mamba-2."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from workers.model.split_products import ProductRows, SplitProducts, fused_rows
from workers.model.state.causal_conv import PartChannels
from workers.model.state.gated_norm import GatedNorm, NormGroups
from workers.model.state.mamba2 import Mamba2
from workers.model.state.mamba2_scan import ScanHeads
from workers.model.state.mamba2_shape import Mamba2Shape
from workers.model.state.state_weights import StateWeightReader, StateWeights


@dataclasses.dataclass(frozen=True, slots=True)
class Mamba2Weights(StateWeights):
    """The weights of a layer: `inputs` has the rows of the gates, of the channels of heads, of both kinds of
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
        shape, held = self.shape, self.held
        groups = NormGroups.of(shape.inner_size, shape.num_groups, held, self.num_parts)
        parts = _channels_of_parts(shape, held, self.num_parts)
        num_kept = sum(map(len, parts[0])) * (shape.kernel_size - 1)
        return Mamba2(
            self._heads(num_kept),
            self.kernel,
            self.conv_bias,
            parts,
            GatedNorm(self.norm, self.eps, groups),
            self.dtype,
            is_deterministic=is_deterministic,
        )

    def _heads(self, num_kept: int) -> ScanHeads:
        shape, num_heads = self.shape, len(self.decay_log)
        groups = shape.groups_of(self.held, self.num_parts)
        first = self.held.start * shape.part_heads(self.num_parts)
        in_group = shape.num_heads // shape.num_groups
        of_heads = [head // in_group - groups.start for head in range(first, first + num_heads)]
        return ScanHeads(
            shape.head_dim,
            shape.state_size,
            len(groups),
            num_kept,
            shape.step_limits,
            self.step_bias,
            -torch.exp(self.decay_log),
            self.skip,
            torch.tensor(of_heads, device=self.skip.device),
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
            (products.of_outputs(parts, has_bias=shape.has_bias),),
            products.of_inputs(f"{prefix}out_proj", num_inner, inner, has_bias=shape.has_bias),
            products.files.dtype,
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


def _channels_of_parts(shape: Mamba2Shape, held: range, num_parts: int) -> PartChannels:
    """Return the convolved channels of a rank that each of its parts keeps: those of its heads, and both
    kinds of those of each of its groups."""
    part, size = shape.part_heads(num_parts) * shape.head_dim, shape.state_size
    groups, num_inner = shape.groups_of(held, num_parts), len(held) * part

    def of_group(group: int, kind: int) -> range:
        start = num_inner + (kind * len(groups) + group - groups.start) * size
        return range(start, start + size)

    found = []
    for number, its in enumerate(held):
        own = shape.groups_of(range(its, its + 1), num_parts)
        of_groups = [of_group(group, kind) for kind in range(2) for group in own]
        found.append([range(number * part, (number + 1) * part), *of_groups])
    return found
