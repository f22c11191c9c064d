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
# That to which embedding and head are rounded, where products have fewer than 16 bits: 4 bits of a head, or
# the 3 bits behind the point that FP8 has, cost more quality than those of all other products.
_ROUNDED_TABLE = _ROUNDED["int8"]
# The number of the way in which weights are rounded to a form, where it has changed: with other codes, KV is
# other KV.
_WAYS = {"int4": 2}
# The devices with kernels for products of quantized weights.
QUANTIZED_ON = ("cpu", "cuda")
# The codes of weights whose products round their inputs on a device, where the checkpoint means that;
# experts never do.
ROUNDS_INPUTS_ON = {"cpu": (CodeType.INT8,), "cuda": (CodeType.INT8, CodeType.FP8)}


@dataclasses.dataclass(frozen=True, slots=True)
class WeightForm:
    """`auto`: weights of products, and the tables of embedding and head, are kept as they are stored, where
    there are products for them; the name of a dtype: quantized ones are dequantized as they are read; or all
    are rounded to the nearest code."""

    name: str = "auto"

    @property
    def rounded(self) -> StoredFormat | None:
        """The format to which weights of products are rounded; None: to none."""
        return _ROUNDED.get(self.name)

    @property
    def rounded_table(self) -> StoredFormat | None:
        """The format to which the tables of embedding and head are rounded; None: to none."""
        return _ROUNDED_TABLE if self.name in _ROUNDED else None

    @property
    def keeps_stored(self) -> bool:
        """Whether quantized weights stay so."""
        return self.name == "auto"

    def on(self, device: str, *, can_compile: bool = True) -> WeightForm:
        """Return the form that products on the device keep in memory. `can_compile`: there are kernels for
        CPUs."""
        is_kept = device in QUANTIZED_ON and (can_compile or device != "cpu")
        return self if is_kept else DEQUANTIZED

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
            way = f" in way {_WAYS[self.name]}" if self.name in _WAYS else ""
            return f"{' and '.join(dict.fromkeys(rounded))}, rounded{way}"
        if scheme is None or not self.keeps_stored:
            return dtype
        names = (
            f"{it.name}, of rounded inputs" if rounds_inputs_of(it, device) else it.name
            for it in (targeted.format for targeted in scheme.formats)
        )
        return " and ".join(dict.fromkeys(names))


def rounds_inputs_of(stored: StoredFormat, device: str) -> bool:
    """Whether products with weights of this format round their inputs on the device; on CPUs only where a
    scale belongs to all inputs."""
    is_known = stored.codes in ROUNDS_INPUTS_ON.get(device, ()) and (device != "cpu" or not stored.group)
    return stored.quantizes_inputs and is_known


AS_STORED = WeightForm()
# Of products on devices without such kernels.
DEQUANTIZED = WeightForm("bf16")
