"""Draws quantized weights of the forms of published checkpoints."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from workers.model.quantization.quantized_weight import Codes, QuantizedWeight


class QuantizedForm(NamedTuple):
    """The form of a weight; a `group` of 0 is all inputs of an output."""

    codes: Codes
    group: int
    has_offsets: bool = False
    quantizes_inputs: bool = False


QUANTIZED_FORMS = {
    "awq": QuantizedForm(Codes.UINT4, 128, has_offsets=True),
    "mxfp4": QuantizedForm(Codes.E2M1, 32),
    "w8a8": QuantizedForm(Codes.INT8, 0, quantizes_inputs=True),
    "fp8": QuantizedForm(Codes.E4M3, 0, quantizes_inputs=True),
    "block fp8": QuantizedForm(Codes.E4M3, 128, quantizes_inputs=True),
}


def draw_quantized(
    form: QuantizedForm, num_outputs: int, num_inputs: int, device: torch.device
) -> QuantizedWeight:
    """Draw a weight on the device. Scales of 4 bits are stored in 16, and groups divide the inputs."""
    group = math.gcd(form.group, num_inputs)
    num_bytes = num_inputs * form.codes.num_bits // 8
    packed = torch.randint(0, 126, (num_outputs, num_bytes), dtype=torch.uint8, device=device)
    scales = torch.rand(num_outputs, num_inputs // group, device=device) * 1e-3
    if form.codes.num_bits == 4:
        scales = scales.half().float()
    weight = QuantizedWeight(form.codes, packed, scales, group, quantizes_inputs=form.quantizes_inputs)
    return dataclasses.replace(weight, offsets=-4 * scales) if form.has_offsets else weight
