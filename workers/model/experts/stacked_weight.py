"""The quantized weights of one product of all experts, side by side in tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.quantization.exact_scales import common_zero, exact_dtype
from workers.model.quantization.kept_forms import are_alike
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight

# The code of 4 bits that means zero where there are no offsets, `has_middle`.
_MIDDLE = 8


@dataclasses.dataclass(frozen=True, slots=True)
class StackedWeight:
    """The weights [num_experts, num_outputs, num_inputs] in the form of `QuantizedWeight`: `packed` uint8
    [num_experts, num_outputs, num_inputs * num_bits / 8]; `scales` and, if there are any, `offsets`
    [num_experts, num_outputs, num_inputs / group], in 16 bits where these hold all of them exactly.

    With `has_middle`, the value of a code of 4 bits is its distance to 8."""

    codes: Codes
    packed: Tensor
    scales: Tensor
    group: int
    offsets: Tensor | None = None
    has_middle: bool = False

    @property
    def num_experts(self) -> int:
        return self.packed.shape[0]

    @property
    def num_outputs(self) -> int:
        return self.packed.shape[1]

    @property
    def num_inputs(self) -> int:
        return self.packed.shape[2] * 8 // self.codes.num_bits

    @property
    def num_bytes(self) -> int:
        """The size of codes, scales and offsets."""
        return sum(it.nbytes for it in (self.packed, self.scales, self.offsets) if it is not None)


def stack_weights(parts: Sequence[Sequence[QuantizedWeight]]) -> StackedWeight | None:
    """Copy the weights of experts, one at a time: they may be read only then. Each of `parts` has one weight
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
    return _narrowed(StackedWeight(first.codes, packed, scales, first.group, offsets))


def _narrowed(weight: StackedWeight) -> StackedWeight:
    """Return the same weight with scales and offsets that take the least memory."""
    scales, offsets = weight.scales, weight.offsets
    if offsets is not None and common_zero(weight.codes, [scales], [offsets]) == _MIDDLE:
        offsets = None
    return dataclasses.replace(
        weight,
        scales=scales.to(exact_dtype([scales])),
        offsets=None if offsets is None else offsets.to(exact_dtype([offsets])),
        has_middle=offsets is None and weight.offsets is not None,
    )
