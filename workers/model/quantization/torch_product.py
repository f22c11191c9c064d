"""Linear products with quantized weights by torch, on any device: the reference of the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workers.model.products import GatedActivation, Linear, TorchLinear, UnpackedLinear
from workers.model.quantization.quantized_weight import QuantizedWeight

# Outputs whose weights are dequantized together.
_BLOCK_OUTPUTS = 1024


class DequantizingLinear(UnpackedLinear):
    """A product whose weight is dequantized part by part, to the dtype of the rows, whenever it is used."""

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None = None, *, gate: GatedActivation | None = None
    ) -> None:
        self._weight, self._bias, self.gate = weight, bias, gate
        self.num_outputs, self.num_inputs = weight.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        result = x.new_empty(x.shape[0], self.num_outputs) if out is None else out
        for outputs, product in self._blocks(x.dtype):
            product(x, result[:, outputs])
        return result

    def floats(self, x: Tensor) -> Tensor:
        return torch.cat([product.floats(x) for _, product in self._blocks(x.dtype)], dim=1)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows in float32, which holds them best."""
        return self._weight.at(ids).dequantized()

    def _blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Linear]]:
        for begin in range(0, self.num_outputs, _BLOCK_OUTPUTS):
            outputs = slice(begin, min(begin + _BLOCK_OUTPUTS, self.num_outputs))
            bias = None if self._bias is None else self._bias[outputs].to(dtype)
            weight = self._weight.rows(outputs).dequantized(dtype)
            yield outputs, TorchLinear(weight, bias)
