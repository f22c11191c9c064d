"""Linear products of rows that are rounded to int8 with weights of int8, by torch: the reference of the
kernels of `native/integer_products.h`, and what runs without a compiler.

A row is rounded by a scale of its own, as vectors of quantized KV are. Sums of products are exact, so the
kernels give the same float32 numbers, bit for bit, and a row's result depends on nothing beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.attention.quantized_kv import Quantized
from workers.model.products import GatedActivation, UnpackedLinear
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight

# The sums of products of so many inputs are exact in 32 bits.
_MOST_INPUTS = 1 << 17
# And of so many in float32, in any order: each is at most 127 * 128.
_FLOAT_INPUTS = 1024
# Outputs whose codes are widened together.
_BLOCK_OUTPUTS = 1024


def rounds_inputs(weight: QuantizedWeight) -> bool:
    """Whether products with the weight round their inputs on a CPU."""
    is_whole = weight.group == weight.num_inputs <= _MOST_INPUTS
    return weight.quantizes_inputs and weight.codes is Codes.INT8 and is_whole


class IntegerLinear(UnpackedLinear):
    """A product with a weight for which `rounds_inputs`."""

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None = None, *, gate: GatedActivation | None = None
    ) -> None:
        assert rounds_inputs(weight)
        self._weight, self._bias, self.gate = weight, bias, gate
        self._codes = weight.packed.view(torch.int8)
        self.num_outputs, self.num_inputs = weight.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        result = self.floats(x)
        return result.to(x.dtype) if out is None else out.copy_(result)

    def floats(self, x: Tensor) -> Tensor:
        weight = self._weight
        rows = Quantized.of(x if weight.order is None else x.index_select(1, weight.order), torch.int8)
        result = _exact_products(rows.elements, self._codes).float().mul_(weight.scales.view(-1))
        if weight.offsets is not None:
            result += weight.offsets.view(-1) * rows.elements.sum(1, keepdim=True).float()
        result *= rows.scales[:, None]
        return result if self._bias is None else result.add_(self._bias.to(x.dtype))

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows in float32, which holds them best."""
        return self._weight.at(ids).dequantized()


def _exact_products(rows: Tensor, codes: Tensor) -> Tensor:
    """Multiply int8 `rows` [num_rows, num_inputs] by int8 `codes` [num_outputs, num_inputs]; int32 [num_rows,
    num_outputs]."""
    sums = torch.zeros(len(rows), len(codes), dtype=torch.int32)
    for first in range(0, rows.shape[1], _FLOAT_INPUTS):
        inputs = slice(first, first + _FLOAT_INPUTS)
        of_rows = rows[:, inputs].float()
        for begin in range(0, len(codes), _BLOCK_OUTPUTS):
            outputs = slice(begin, begin + _BLOCK_OUTPUTS)
            sums[:, outputs] += torch.mm(of_rows, codes[outputs, inputs].float().t()).int()
    return sums
