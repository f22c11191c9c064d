"""Quantized weights as the kernels of CUDA take them, with scales and offsets that take the least memory."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from workers.model.quantization.exact_scales import common_zero, exact_dtype
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight

# The code of 4 bits that means zero where there are no offsets, `has_middle`.
_MIDDLE = 8


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A `QuantizedWeight`, or those of several experts [num_experts, num_outputs, ...]. Scales and offsets
    have 16 bits where these hold all of them exactly. With `has_middle`, the value of a code of 4 bits is its
    distance to 8."""

    codes: Codes
    packed: Tensor
    scales: Tensor
    group: int
    offsets: Tensor | None = None
    order: Tensor | None = None
    quantizes_inputs: bool = False
    has_middle: bool = False

    @property
    def num_outputs(self) -> int:
        return self.packed.shape[-2]

    @property
    def num_inputs(self) -> int:
        return self.packed.shape[-1] * 8 // self.codes.num_bits

    @property
    def shape(self) -> tuple[int, int]:
        """As of one weight."""
        return self.num_outputs, self.num_inputs

    @property
    def num_bytes(self) -> int:
        """The size of codes, scales and offsets."""
        return sum(it.nbytes for it in (self.packed, self.scales, self.offsets) if it is not None)

    @property
    def kernel_codes(self) -> str:
        """The codes by the names that kernels have for them."""
        return "int4" if self.has_middle else self.codes.value

    def narrowed(self) -> DeviceWeight:
        """Return the same weight with scales and offsets that take the least memory."""
        offsets = self.offsets
        if offsets is not None and common_zero(self.codes, [self.scales], [offsets]) == _MIDDLE:
            offsets = None
        return dataclasses.replace(
            self,
            scales=self.scales.to(exact_dtype([self.scales])),
            offsets=None if offsets is None else offsets.to(exact_dtype([offsets])),
            has_middle=offsets is None and self.offsets is not None,
        )

    @staticmethod
    def of(weight: QuantizedWeight) -> DeviceWeight:
        """Return the weight, whose codes stay where they are."""
        whole = DeviceWeight(
            weight.codes,
            weight.packed,
            weight.scales,
            weight.group,
            weight.offsets,
            weight.order,
            weight.quantizes_inputs,
        )
        return whole.narrowed()
