"""Declare the form of a model's weights in memory, as a pool's `weight_dtype` asks for it. No torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from workers.model.quantization.stored_format import CodeType, Layout, QuantizationScheme, StoredFormat

WeightDtype = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "fp8"]
# The formats to which weights are rounded as they are read.
_ROUNDED = {
    "int8": StoredFormat(Layout.PLAIN, CodeType.INT8),
    "int4": StoredFormat(Layout.PACKED, CodeType.INT4, 32),
    "fp8": StoredFormat(Layout.PLAIN, CodeType.FP8),
}
_SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class WeightForm:
    """`auto`: weights of products are kept as they are stored, where there are products for them; the name of
    a dtype: quantized ones are dequantized as they are read; or all are rounded to the nearest code."""

    name: str = "auto"

    @property
    def rounded(self) -> StoredFormat | None:
        """The format to which weights are rounded; None: to none."""
        return _ROUNDED.get(self.name)

    @property
    def keeps_stored(self) -> bool:
        """Whether quantized weights stay so."""
        return self.name == "auto"

    def identity(self, scheme: QuantizationScheme | None, dtype: str) -> str:
        """Return what distinguishes weights in the identity of KV, for a checkpoint of this scheme in a pool
        of this dtype."""
        if (rounded := self.rounded) is not None:
            return f"{rounded.name}, rounded"
        return dtype if scheme is None or not self.keeps_stored else scheme.name


AS_STORED = WeightForm()


def bytes_each(stored: StoredFormat, num_inputs: int) -> float:
    """Return the most that a weight of a product of `num_inputs` takes in memory, with its part of a scale
    and an offset."""
    group = stored.group or num_inputs
    return stored.codes.num_bits / 8 + 2 * _SCALE_BYTES / group
