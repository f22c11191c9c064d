"""Quantized weights as the kernels of CUDA take them, with scales and offsets that take the least memory."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from workers.model.quantization.exact_scales import common_zero, exact_dtype
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight

# The code of 4 bits that means zero where there are no offsets, `has_middle`.
_MIDDLE = 8


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A `QuantizedWeight`, or those of several experts [num_experts, num_outputs, ...]. Scales have 16 bits
    where these hold all of them exactly and those of an output are whole words. With `has_middle`, the value
    of a code of 4 bits is its distance to 8."""

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

    @property
    def scales_name(self) -> str:
        """The name of the dtype of scales."""
        return str(self.scales.dtype).removeprefix("torch.")

    @property
    def scale_words(self) -> Tensor:
        """The scales, those of 16 bits two in an int32."""
        return self.scales if self.scales.dtype == torch.float32 else self.scales.view(torch.int32)

    def narrowed(self) -> DeviceWeight:
        """Return the same weight with scales and offsets that take the least memory."""
        scales, offsets = self.scales, self.offsets
        has_middle = offsets is not None and common_zero(self.codes, [scales], [offsets]) == _MIDDLE
        are_words = scales.shape[-1] % 2 == 0
        return dataclasses.replace(
            self,
            scales=scales.to(exact_dtype([scales])) if are_words else scales,
            offsets=None if has_middle else offsets,
            has_middle=has_middle,
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
