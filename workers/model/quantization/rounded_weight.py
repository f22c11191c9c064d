"""Round weights of floats to quantized ones, as they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.quantization.quantized_weight import Codes, QuantizedWeight
from workers.model.quantization.stored_format import CodeType, StoredFormat
from workers.model.quantization.weight_parts import packed_nibbles

_LARGEST_FP8 = 448.0
_LARGEST_INT8 = 127.0
_LARGEST_UINT4 = 15.0
# The scale of a group of zeros, which has none of its own.
_LEAST_SCALE = 1e-12


def rounded(weight: Tensor, form: StoredFormat) -> QuantizedWeight | None:
    """Round float32 `weight` [num_outputs, num_inputs] to the nearest codes of the form; None where its
    groups are no whole ones. Codes of 4 bits reach from the least to the largest weight of a group; those of
    8 bits are symmetric."""
    num_outputs, num_inputs = weight.shape
    group = form.group or num_inputs
    if num_inputs % group:
        return None
    grouped = weight.view(num_outputs, -1, group)
    if form.codes is CodeType.INT4:
        return _to_uint4(grouped)
    largest = grouped.abs().amax(-1, keepdim=True)
    if form.codes is CodeType.INT8:
        scales = (largest / _LARGEST_INT8).clamp_(min=_LEAST_SCALE)
        codes = (grouped / scales).round_().to(torch.int8)
        return _weight(Codes.INT8, codes.view(torch.uint8), scales, group)
    scales = (largest / _LARGEST_FP8).clamp_(min=_LEAST_SCALE)
    eights = (grouped / scales).clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    return _weight(Codes.E4M3, eights.view(torch.uint8), scales, group)


def _to_uint4(grouped: Tensor) -> QuantizedWeight:
    low = grouped.amin(-1, keepdim=True).clamp_(max=0)
    high = grouped.amax(-1, keepdim=True).clamp_(min=0)
    scales = ((high - low) / _LARGEST_UINT4).clamp_(min=_LEAST_SCALE)
    zeros = (-low / scales).round_().clamp_(0, _LARGEST_UINT4)
    codes = (grouped / scales).round_().add_(zeros).clamp_(0, _LARGEST_UINT4).to(torch.uint8)
    packed = packed_nibbles(codes.flatten(1))
    offsets = (-zeros * scales).squeeze(-1)
    return QuantizedWeight(Codes.UINT4, packed, scales.squeeze(-1), grouped.shape[-1], offsets)


def _weight(codes: Codes, bytes_of_codes: Tensor, scales: Tensor, group: int) -> QuantizedWeight:
    return QuantizedWeight(codes, bytes_of_codes.flatten(1), scales.squeeze(-1), group)
