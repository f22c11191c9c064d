"""The forms in which the matrices of a GGUF file stay quantized: each as its type has it, but that those
which are parts of one product share a form, in which all of them are exact."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
from gguf.constants import GGMLQuantizationType

from workers.model.gguf.gguf_blocks import FORMS, Bytes, QuantizedRows, quantized_rows
from workers.model.gguf.gguf_names import WrittenTensor
from workers.model.quantization.stored_format import CodeType, Layout, StoredFormat

# The matrices of a layer whose rows are one product, and those of another.
_PARTS = re.compile(r"(.*)\.(?:(?P<qkv>[qkv])_proj|(?P<gate_up>gate_proj|up_proj|w[13]))\.weight")
# Values of codes of 4 bits as codes of 8 bits, which count in steps of so many scales.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
_TABLES = {
    CodeType.INT4: (np.arange(16, dtype=np.int8), 1.0),
    CodeType.IQ4_NL: (np.array(_IQ4_NL, np.int8), 1.0),
    CodeType.FP4: (np.array([*_E2M1, *(-value for value in _E2M1)], np.int8), 0.5),
}


def kept_forms(tensors: Iterable[WrittenTensor]) -> dict[str, StoredFormat]:
    """Return the forms of the matrices that stay quantized, by their names."""
    own = {tensor.name: form for tensor in tensors if (form := _own_form(tensor)) is not None}
    product_to_names: dict[str, list[str]] = {}
    for name in own:
        found = _PARTS.fullmatch(name)
        product = f"{found[1]} {found.lastgroup}" if found else name
        product_to_names.setdefault(product, []).append(name)
    return {
        name: _common([own[part] for part in names]) for names in product_to_names.values() for name in names
    }


def rows_in_form(stored: Bytes, kind: GGMLQuantizationType, form: StoredFormat) -> QuantizedRows:
    """Take rows of blocks [num_rows, num_stored_bytes] apart, in a form of `kept_forms`."""
    packed, scales, offsets = quantized_rows(stored, kind)
    codes, factor = FORMS[kind].codes, FORMS[kind].group // form.group
    if codes is not form.codes:
        table, step = _TABLES[codes]
        nibbles = np.stack((packed & np.uint8(0xF), packed >> np.uint8(4)), -1).reshape(len(packed), -1)
        packed, scales = table[nibbles].view(np.uint8), scales * np.float32(step)
    if factor > 1:
        scales = scales.repeat(factor, 1)
        offsets = None if offsets is None else offsets.repeat(factor, 1)
    if form.has_zeros and offsets is None:
        offsets = np.zeros_like(scales)
    return QuantizedRows(packed, scales, offsets)


def _own_form(tensor: WrittenTensor) -> StoredFormat | None:
    """Return the form of the type of a matrix whose values are those of the file; None for any other."""
    is_matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight")
    if not is_matrix or tensor.shift or tensor.source.type_number not in FORMS:
        return None
    form = FORMS[GGMLQuantizationType(tensor.source.type_number)]
    return StoredFormat(Layout.OWN, form.codes, form.group, has_zeros=form.has_offsets)


def _common(forms: Sequence[StoredFormat]) -> StoredFormat:
    """Return the form that holds all of these exactly."""
    if len(set(forms)) == 1:
        return forms[0]
    codes = {form.codes for form in forms}
    return StoredFormat(
        Layout.OWN,
        codes.pop() if len(codes) == 1 else CodeType.INT8,
        math.gcd(*(form.group for form in forms)),
        has_zeros=any(form.has_zeros for form in forms),
    )
