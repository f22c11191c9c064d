"""Draws quantized weights for tests of their products."""

from __future__ import annotations

import dataclasses

import torch

from workers.model.quantization.quantized_weight import Codes, QuantizedWeight


def draw(
    codes: Codes,
    num_outputs: int,
    num_inputs: int,
    group: int,
    *,
    has_offsets: bool = False,
    has_order: bool = False,
    quantizes_inputs: bool = False,
) -> QuantizedWeight:
    """Draw a weight whose products with normal inputs are about 1."""
    packed = torch.randint(0, 256, (num_outputs, num_inputs * codes.num_bits // 8), dtype=torch.uint8)
    if codes is Codes.E4M3:  # without NaN
        packed = torch.where((packed & 0x7F) == 0x7F, 0, packed)
    unit = {Codes.INT8: 64, Codes.UINT4: 8, Codes.E4M3: 128, Codes.E2M1: 3, Codes.IQ4_NL: 64}[codes]
    scales = (0.5 + torch.rand(num_outputs, num_inputs // group)) / (unit * num_inputs**0.5)
    offsets = torch.randn(num_outputs, num_inputs // group) * num_inputs**-0.5 if has_offsets else None
    order = torch.randperm(num_inputs) if has_order else None
    return QuantizedWeight(codes, packed, scales, group, offsets, order, quantizes_inputs)


def moved(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Return the weight on the device."""
    return dataclasses.replace(
        weight,
        packed=weight.packed.to(device),
        scales=weight.scales.to(device),
        offsets=None if weight.offsets is None else weight.offsets.to(device),
        order=None if weight.order is None else weight.order.to(device),
    )
