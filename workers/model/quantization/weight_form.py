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
# Those to which embedding and head are rounded, where products have fewer than 16 bits: 4 bits of a head cost
# more quality than those of all other products.
_ROUNDED_TABLES = {
    "int8": _ROUNDED["int8"],
    "int4": _ROUNDED["int8"],
    "fp8": _ROUNDED["fp8"],
}
# The devices with kernels for products of quantized weights.
QUANTIZED_ON = ("cpu", "cuda")
# Those on which products round their inputs, where the checkpoint means that; experts never do.
ROUNDS_INPUTS_ON = ("cuda",)
# Those on which experts have such weights as well.
EXPERTS_ON = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True, slots=True)
class WeightForm:
    """`auto`: weights of products, and the tables of embedding and head, are kept as they are stored, where
    there are products for them; the name of a dtype: quantized ones are dequantized as they are read; or all
    are rounded to the nearest code.
    `has_experts`: experts have this form too, where memory is computed."""

    name: str = "auto"
    has_experts: bool = True

    @property
    def rounded(self) -> StoredFormat | None:
        """The format to which weights of products are rounded; None: to none."""
        return _ROUNDED.get(self.name)

    @property
    def rounded_table(self) -> StoredFormat | None:
        """The format to which the tables of embedding and head are rounded; None: to none."""
        return _ROUNDED_TABLES.get(self.name)

    @property
    def keeps_stored(self) -> bool:
        """Whether quantized weights stay so."""
        return self.name == "auto"

    def on(self, device: str, *, can_compile: bool = True) -> WeightForm:
        """Return the form that products on the device keep in memory. `can_compile`: there are kernels for
        CPUs."""
        if device not in QUANTIZED_ON or (device == "cpu" and not can_compile):
            return DEQUANTIZED
        return dataclasses.replace(self, has_experts=device in EXPERTS_ON)

    def bytes_each(self, stored: StoredFormat | None, item_bytes: int, *, is_table: bool = False) -> float:
        """Return the bytes of a weight of a product, or of a table of embedding or head, that is stored in
        this format (None: as floats), where floats are kept with `item_bytes`."""
        rounded = self.rounded_table if is_table else self.rounded
        kept = rounded or (stored if self.keeps_stored else None)
        return item_bytes if kept is None else kept.bytes_each

    def identity(self, scheme: QuantizationScheme | None, dtype: str, device: str) -> str:
        """Return what distinguishes weights in the identity of KV, for a checkpoint of this scheme in a pool
        of this dtype on a device: products of rounded inputs give other KV, and so do rounded embeddings."""
        rounded = [form.name for form in (self.rounded, self.rounded_table) if form is not None]
        if rounded:
            return f"{' and '.join(dict.fromkeys(rounded))}, rounded"
        if scheme is None or not self.keeps_stored:
            return dtype
        is_rounding = scheme.quantizes_inputs and device in ROUNDS_INPUTS_ON
        return f"{scheme.name}, of rounded inputs" if is_rounding else scheme.name


AS_STORED = WeightForm()
# Of products on devices without such kernels.
DEQUANTIZED = WeightForm("bf16")
