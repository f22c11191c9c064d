"""Read a rank's part of the layers that mix by a short convolution."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from workers.model.split_products import ProductRows, SplitProducts, fused_rows
from workers.model.state.short_conv import ShortConv
from workers.model.state.short_conv_shape import ShortConvShape
from workers.model.state.state_weights import StateWeightReader, StateWeights


@dataclasses.dataclass(frozen=True, slots=True)
class ShortConvWeights(StateWeights):
    """The weights of a layer: `inputs` has the rows of both gates, the one before the convolution first, and
    of the channels that are convolved; `kernel` float32 [num_channels, kernel_size], `bias`
    [num_channels]."""

    kernel: Tensor
    bias: Tensor | None

    def make_mixer(self, *, is_deterministic: bool) -> ShortConv:
        return ShortConv(self.kernel, self.bias, self.dtype)


class ShortConvWeightReader(StateWeightReader):
    """Reads the channels of the parts of the state that a rank holds, `held` of `num_parts`."""

    def __init__(self, products: SplitProducts, shape: ShortConvShape, held: range, num_parts: int) -> None:
        self._products, self._shape = products, shape
        size = shape.part_channels(num_parts)
        self._channels = slice(held.start * size, held.stop * size)

    def layer(self, prefix: str) -> ShortConvWeights:
        shape, rows, products = self._shape, self._channels, self._products
        size, has_bias = shape.num_channels, shape.has_bias
        parts = fused_rows(f"{prefix}in_proj", [ProductRows("", size, rows)] * 3)
        kernel = products.floats(f"{prefix}conv.weight", (size, 1, shape.kernel_size), rows)
        return ShortConvWeights(
            (products.of_outputs(parts, has_bias=has_bias),),
            products.of_inputs(f"{prefix}out_proj", size, rows, has_bias=has_bias),
            products.files.dtype,
            kernel[:, 0].contiguous(),
            products.floats(f"{prefix}conv.bias", (size,), rows) if has_bias else None,
        )
