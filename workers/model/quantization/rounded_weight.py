"""Round weights of floats to quantized ones, as they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.quantization.nearest_codes import away_from_zero, least_error_scales, nearest_codes
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight
from workers.model.quantization.stored_format import CodeType, StoredFormat
from workers.model.quantization.weight_parts import packed_nibbles

_LARGEST_FP8 = 448.0
_LARGEST_INT8 = 127.0
# The code of zero among those of 4 bits, and by what the weight of the largest magnitude in a group may be
# divided for a scale: few, for this is done at each start. Mostly it becomes the smallest code, which has no
# opposite.
_ZERO = 8
_DIVISORS = (-7.5, -8.0, -8.5, 7.0)
# The scale of a group of zeros, which has none of its own.
_LEAST_SCALE = 1e-12


def rounded(weight: Tensor, form: StoredFormat) -> QuantizedWeight | None:
    """Round float32 `weight` [num_outputs, num_inputs] to the nearest codes of the form, which has no zero
    points; None where its groups are no whole ones."""
    num_inputs = weight.shape[1]
    group = form.group or num_inputs
    if num_inputs % group:
        return None
    grouped = weight.view(len(weight), -1, group)
    if form.codes is CodeType.INT4:
        return _to_int4(grouped)
    largest = grouped.abs().amax(-1, keepdim=True)
    if form.codes is CodeType.INT8:
        scales = (largest / _LARGEST_INT8).clamp_(min=_LEAST_SCALE)
        bytes_of_codes = (grouped / scales).round_().to(torch.int8).view(torch.uint8)
        return QuantizedWeight(Codes.INT8, bytes_of_codes.flatten(1), scales.squeeze(-1), group)
    scales = (largest / _LARGEST_FP8).clamp_(min=_LEAST_SCALE)
    eights = (grouped / scales).clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    return QuantizedWeight(Codes.E4M3, eights.view(torch.uint8).flatten(1), scales.squeeze(-1), group)


def _to_int4(grouped: Tensor) -> QuantizedWeight:
    """Round groups [num_outputs, num_groups, group], with scales that bfloat16 holds."""

    def stored(scales: Tensor) -> Tensor:
        return away_from_zero(scales, _LEAST_SCALE).bfloat16()

    best = least_error_scales(grouped, _ZERO - 1, _DIVISORS, stored)
    codes = nearest_codes(grouped, best, _ZERO - 1).add_(_ZERO).to(torch.uint8)
    offsets = best * -_ZERO
    return QuantizedWeight(Codes.UINT4, packed_nibbles(codes.flatten(1)), best, grouped.shape[-1], offsets)
