"""Read a rank's part of the layers of the gated delta rule."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from workers.model.linear_weights import LinearWeights, are_quantized, are_tensors
from workers.model.norm import Norm
from workers.model.quantization.quantized_weight import are_alike
from workers.model.split_products import ProductRows, SplitProducts
from workers.model.state.delta_mixer import DeltaMixer
from workers.model.state.delta_rule import DeltaWeights
from workers.model.state.delta_shape import DeltaHeads, DeltaShape
from workers.model.state.state_weights import StateWeightReader, StateWeights


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaLayerWeights(StateWeights):
    """The weights of a layer: `inputs` have the rows of the channels, of the gates, of the betas and of the
    decays, of the `heads` that the rank holds; `kernel` float32 [num_channels, kernel_size]; `rates`,
    `biases` float32 [num_value_heads] and `norm_weight` float32 [value_dim] are those of `DeltaWeights`."""

    heads: DeltaHeads
    kernel: Tensor
    rates: Tensor
    biases: Tensor
    norm_weight: Tensor
    norm_eps: float

    def make_mixer(self, *, is_deterministic: bool) -> DeltaMixer:
        weights = DeltaWeights(self.rates, self.biases, Norm(self.norm_weight, self.norm_eps))
        return DeltaMixer(self.heads, self.kernel, weights, self.dtype, is_deterministic=is_deterministic)


class DeltaWeightReader(StateWeightReader):
    """Reads the heads of the parts of the state that a rank holds, `held` of `num_parts`."""

    def __init__(self, products: SplitProducts, shape: DeltaShape, held: range, num_parts: int) -> None:
        self._products, self._shape = products, shape
        self._heads = shape.heads.of_parts(len(held), num_parts)
        each = shape.heads.of_parts(1, num_parts)
        self._key_heads = range(held.start * each.num_key_heads, held.stop * each.num_key_heads)
        first, end = (it * shape.heads.values_per_key for it in (self._key_heads.start, self._key_heads.stop))
        self._value_heads = slice(first, end)

    def layer(self, prefix: str) -> DeltaLayerWeights:
        shape, products, held = self._shape, self._products, self._value_heads
        heads, num_heads = shape.heads, (shape.heads.num_value_heads,)
        columns = slice(held.start * heads.value_dim, held.stop * heads.value_dim)
        return DeltaLayerWeights(
            self._fused_inputs(prefix) if shape.is_fused else self._inputs(prefix),
            products.of_inputs(f"{prefix}out_proj", heads.num_values, columns, has_bias=False),
            products.files.dtype,
            self._heads,
            self._kernel(f"{prefix}conv1d.weight"),
            products.floats(f"{prefix}A_log", num_heads, held).exp_(),
            products.floats(f"{prefix}dt_bias", num_heads, held),
            products.floats(f"{prefix}norm.weight", (heads.value_dim,)),
            shape.norm_eps,
        )

    def _channel_rows(self) -> list[slice]:
        """Return where the channels that the rank holds are among queries, keys and values of all heads."""
        heads, num_keys = self._shape.heads, self._shape.heads.num_key_heads * self._shape.heads.key_dim
        num_values, rows = heads.values_per_key * heads.value_dim, []
        for head in self._key_heads:
            first, value = head * heads.key_dim, 2 * num_keys + head * num_values
            queries = slice(first, first + heads.key_dim)
            keys = slice(num_keys + first, num_keys + first + heads.key_dim)
            rows += [queries, keys, slice(value, value + num_values)]
        return rows

    def _inputs(self, prefix: str) -> tuple[LinearWeights, ...]:
        """Join the products of each kind."""
        heads, held = self._shape.heads, self._value_heads
        qkv, z = f"{prefix}in_proj_qkv", f"{prefix}in_proj_z"
        parts = [ProductRows(qkv, heads.num_channels, rows) for rows in self._channel_rows()]
        of_values = slice(held.start * heads.value_dim, held.stop * heads.value_dim)
        parts.append(ProductRows(z, heads.num_values, of_values))
        few = [ProductRows(f"{prefix}in_proj_{it}", heads.num_value_heads, held) for it in "ba"]
        return self._joined(parts, few)

    def _fused_inputs(self, prefix: str) -> tuple[LinearWeights, ...]:
        """Join what each key head has in the two products."""
        heads, num_values = self._shape.heads, self._shape.heads.values_per_key
        width, num_channels = heads.channels_per_key + num_values * heads.value_dim, heads.channels_per_key
        many, few = (f"{prefix}{name}" for name in ("in_proj_qkvz", "in_proj_ba"))
        starts = [head * width for head in self._key_heads]
        of_channels = [slice(start, start + num_channels) for start in starts]
        of_gates = [slice(start + num_channels, start + width) for start in starts]
        firsts = [head * 2 * num_values + first for first in (0, num_values) for head in self._key_heads]
        num_rows, num_few = heads.num_key_heads * width, 2 * heads.num_value_heads
        return self._joined(
            [ProductRows(many, num_rows, rows) for rows in (*of_channels, *of_gates)],
            [ProductRows(few, num_few, slice(first, first + num_values)) for first in firsts],
        )

    def _joined(self, many: list[ProductRows], few: list[ProductRows]) -> tuple[LinearWeights, ...]:
        """Join the rows of two lists, tensors of the second in one part: it has few of each head. Where one
        alone is quantized, as checkpoints have it, or in another form, they stay two products."""
        first, second = (self._products.of_outputs(it, has_bias=False) for it in (many, few))
        if are_tensors(first.parts) and are_tensors(second.parts):
            return (LinearWeights((*first.parts, torch.cat(second.parts)), None),)
        parts = (*first.parts, *second.parts)
        return (LinearWeights(parts, None),) if are_quantized(parts) and are_alike(parts) else (first, second)

    def _kernel(self, name: str) -> Tensor:
        """Read the rows of a convolution in the order of the channels that the rank holds."""
        shape = self._shape
        kernel = self._products.floats(name, (shape.heads.num_channels, 1, shape.kernel_size))
        return torch.cat([kernel[rows, 0] for rows in self._channel_rows()])
