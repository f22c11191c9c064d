"""Put the quantized weights of one product of all experts side by side in tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.model.quantization.device_weight import DeviceWeight
from workers.model.quantization.quantized_weight import QuantizedWeight, are_alike


def stack_weights(parts: Sequence[Sequence[QuantizedWeight]]) -> DeviceWeight | None:
    """Copy the weights of experts, one at a time: they may be read only then. Each of `parts` has a weight
    of every expert, whose outputs follow those of the part before. Returns None where weights have several
    forms, or their inputs an order."""
    first, num_experts = parts[0][0], len(parts[0])
    ends = [part[0].num_outputs for part in parts]
    packed = first.packed.new_empty(num_experts, sum(ends), first.packed.shape[1])
    scales = first.scales.new_empty(num_experts, sum(ends), first.scales.shape[1])
    offsets = None if first.offsets is None else torch.empty_like(scales)
    for expert in range(num_experts):
        start = 0
        for part in parts:
            weight = part[expert]
            if weight.order is not None or not are_alike((first, weight)):
                return None
            rows = slice(start, start + weight.num_outputs)
            packed[expert, rows], scales[expert, rows] = weight.packed, weight.scales
            if offsets is not None and weight.offsets is not None:
                offsets[expert, rows] = weight.offsets
            start = rows.stop
    return DeviceWeight(first.codes, packed, scales, first.group, offsets).narrowed()
