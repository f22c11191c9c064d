"""Elements of quantized KV in Triton: read, and written as `workers.model.attention.quantized_kv` has them.

fp8 (e4m3) is read and written by integer operations, so that no card needs instructions for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.kv_form import SCALE_BYTES

# The kernels' names of the elements of KV; 0: of the dtype of activations.
INT8, FP8 = tl.constexpr(1), tl.constexpr(2)
ELEMENTS = {torch.int8: 1, torch.float8_e4m3fn: 2}
# From distances of elements, which are bytes, to those of scales.
SCALE = tl.constexpr(SCALE_BYTES)
_ABSOLUTE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)
# The bits of sign, exponent and mantissa that half precision has of e4m3, as int16.
_HALF_BITS = tl.constexpr(0xBF80 - 0x10000)
# The numbers from which on a float's unit of the last place is 1, and 2^-9, that of the smallest elements.
_INTEGERS, _SMALLEST = tl.constexpr(12582912.0), tl.constexpr(16384.0)
_LEAST = tl.constexpr(2.0**-100)


def raw_elements(kv: Tensor) -> Tensor:
    """Return quantized elements as bytes with a sign; others as they are."""
    return kv.view(torch.int8) if kv.dtype in ELEMENTS else kv


@triton.jit
def unit(ELEMENTS: tl.constexpr):
    """Return the factor from what `widened` returns to the elements: half precision has a larger bias of
    exponents than e4m3."""
    return 256.0 if ELEMENTS == FP8 else 1.0


@triton.jit
def widened(raw, dtype: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return elements in the dtype of activations, in which they are exact."""
    if ELEMENTS == INT8:
        return raw.to(dtype)
    elif ELEMENTS == FP8:
        half = ((raw.to(tl.int16) << 7) & _HALF_BITS).to(tl.float16, bitcast=True)
        return half.to(tl.float32).to(dtype)
    else:
        return raw


@triton.jit
def magnitude_bits(x):
    """Return the bits of absolute values of float32, which order them, with NaN above all."""
    return x.to(tl.int32, bitcast=True) & _ABSOLUTE


@triton.jit
def scale_of(most_bits, ELEMENTS: tl.constexpr):
    """Return the inverse of the scale, and the scale, of vectors with these bits of their largest absolute
    value."""
    largest = 448.0 if ELEMENTS == FP8 else 127.0
    most = most_bits.to(tl.float32, bitcast=True)
    is_finite = most_bits < _INFINITE
    is_kept = is_finite & (most >= _LEAST)
    known = tl.where(is_kept, most, largest)
    inverse = tl.where(is_kept, tl.div_rn(tl.full(known.shape, largest, tl.float32), known), 0.0)
    scale = tl.where(is_kept, tl.div_rn(known, tl.full(known.shape, largest, tl.float32)), 0.0)
    return inverse, tl.where(is_finite, scale, float("nan"))


@triton.jit
def narrowed(x, ELEMENTS: tl.constexpr):
    """Return float32 numbers in the range of the elements, rounded to nearest even, as bytes."""
    if ELEMENTS == INT8:
        bits = (x + _INTEGERS).to(tl.int32, bitcast=True)
    else:
        magnitude = magnitude_bits(x)
        grid = magnitude.to(tl.float32, bitcast=True) + _SMALLEST
        small = grid.to(tl.int32, bitcast=True) - 0x46800000
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        bits = tl.where(magnitude < 0x3C800000, small, normal)
        bits |= (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return bits.to(tl.int8)
