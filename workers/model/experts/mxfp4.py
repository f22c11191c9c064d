"""Dequantize MXFP4, in which gpt-oss publishes its experts: blocks of 32 numbers of 4 bits, each block times
a power of two (Open Compute Project, Microscaling Formats 1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.quantization.quantized_weight import Codes, QuantizedWeight

# The numbers of a block, and the bytes that hold them, two each, the first in the lower bits.
BLOCK_ITEMS = 32
BLOCK_BYTES = 16
# The numbers by their codes: sign, two bits of exponent, one of mantissa.
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


def quantized(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """Return the numbers of `blocks` and `scales`, as `dequantized` takes them, in the form of all quantized
    weights."""
    factors = torch.ldexp(torch.ones(scales.shape), scales.int() - _SCALE_BIAS)
    return QuantizedWeight(Codes.E2M1, blocks.flatten(1).contiguous(), factors.contiguous(), BLOCK_ITEMS)


def dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [num_rows, num_blocks * 32] of uint8 `blocks` [num_rows, num_blocks, 16] and
    `scales` [num_rows, num_blocks], which bfloat16 and float32 hold exactly."""
    numbers = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)], dtype=torch.float32)
    pairs = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)
    exponents = (scales.int() - _SCALE_BIAS)[..., None]
    return torch.ldexp(numbers[pairs.int()], exponents).to(dtype).flatten(-2)
