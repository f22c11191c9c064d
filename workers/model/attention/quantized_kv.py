"""Keys and values in 8 bits: their places in a rank's KV, and the numbers that they stand for.

A quantized KV is a contiguous tensor [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim + 4]
of one-byte elements. Its last two dimensions are the bytes of a head of a block: first the elements
[block_tokens, head_dim], then float32 scales [block_tokens]. So whatever moves blocks, layers or heads moves
both together.

An element stands for itself times the scale of its token and head, which is the vector's largest absolute
value divided by the largest element. What is quantized are the values that KV of the activations' dtype would
hold, so that every backend writes the same bits. A vector of which an element is not finite has the scale
NaN: whoever attends to it gets NaN, as from KV of any other form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.kv_form import SCALE_BYTES

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Vectors of smaller elements become zeros: the inverse of their scale might not be finite.
_LEAST = 2.0**-100


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV for `engine.kv_dtype` beside activations of `dtype`."""
    return _DTYPES.get(name, dtype)


def is_quantized(kv: Tensor) -> bool:
    """Whether a KV, or a part of it, has scales."""
    return kv.dtype in _LARGEST


def head_dim_of(kv: Tensor, num_scales: int = 1) -> int:
    """Return the size of a head of a KV [..., head_dim], without the bytes of the scales of a vector."""
    return kv.shape[-1] - num_scales * SCALE_BYTES if is_quantized(kv) else kv.shape[-1]


class Quantized(NamedTuple):
    """Vectors in 8 bits: elements [..., head_dim], and float32 scales [...]."""

    elements: Tensor
    scales: Tensor

    @staticmethod
    def of(vectors: Tensor, dtype: torch.dtype) -> Quantized:
        """Quantize `vectors` [..., head_dim] to one of the dtypes of quantized KV."""
        wide = vectors.float()
        most = wide.abs().amax(-1)
        largest = torch.full_like(most, _LARGEST[dtype])  # by a number torch may divide in another way
        is_finite, is_zero = most.isfinite(), most < _LEAST
        scales = torch.where(is_zero, 0.0, most / largest)
        scales = torch.where(is_finite, scales, float("nan"))
        scaled = wide * (largest / most)[..., None]
        scaled = torch.where((is_finite & ~is_zero)[..., None], scaled, 0.0)
        if dtype == torch.int8:
            scaled = scaled.round()
        return Quantized(scaled.to(dtype), scales)

    def floats(self) -> Tensor:
        """Return the vectors, float32."""
        return self.elements.float() * self.scales[..., None]


def quantized_parts(kv: Tensor) -> Quantized:
    """View a quantized KV, or blocks, layers or heads of it [..., block_tokens, head_dim + 4], as elements
    [..., block_tokens, head_dim] and scales [..., block_tokens]."""
    elements, scales = elements_and_scales(kv, head_dim_of(kv))
    return Quantized(elements, scales.squeeze(-2))


def elements_and_scales(heads: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """View heads of which a token has `width` elements, in one or more parts with a scale each
    [..., block_tokens, width + 4 * num_parts], as elements [..., block_tokens, width] and scales
    [..., num_parts, block_tokens]."""
    *outer, block_tokens, num_bytes = heads.shape
    assert heads.stride()[-2:] == (num_bytes, 1), "heads of a block are contiguous"
    strides, num_parts = heads.stride()[:-2], (num_bytes - width) // SCALE_BYTES
    elements = heads.as_strided((*outer, block_tokens, width), (*strides, width, 1))
    row_bytes = block_tokens * SCALE_BYTES
    raw = heads.as_strided(
        (*outer, num_parts, row_bytes),
        (*strides, row_bytes, 1),
        heads.storage_offset() + block_tokens * width,
    )
    return elements, raw.view(torch.float32)


def widened(heads: Tensor, parts: Sequence[int]) -> Tensor:
    """Return the vectors of heads whose parts have a scale each, float32 [..., block_tokens, sum(parts)]."""
    elements, scales = elements_and_scales(heads, sum(parts))
    vectors = [
        Quantized(each, scales[..., number, :]).floats()
        for number, each in enumerate(torch.split(elements, list(parts), -1))
    ]
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors, -1)
