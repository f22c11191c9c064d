"""The format in which weights of GGUF files are kept: what a `QuantizedWeight` has, as tensors of their
own.

Of a weight X, `X_codes` uint8 are its codes as they lie in memory, `X_scales` and, if there are any,
`X_offsets` float32 those of the groups. `quantization_config` of config.json says which codes and groups the
products have, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from workers.model.config_values import shown
from workers.model.quantization.stored_format import (
    CodeType,
    Layout,
    QuantizationScheme,
    StoredFormat,
    TargetedFormat,
    product_of,
)

METHOD = "tandem"
_VERSION = 1


def own_config(name_to_form: Mapping[str, StoredFormat]) -> dict[str, Any]:
    """Return the `quantization_config` of weights by their names."""
    form_to_products: dict[StoredFormat, list[str]] = {}
    for name, form in name_to_form.items():
        form_to_products.setdefault(form, []).append(product_of(name))
    formats = [
        {
            "codes": str(form.codes),
            "group_size": form.group,
            "has_offsets": form.has_zeros,
            "targets": products,
        }
        for form, products in form_to_products.items()
    ]
    return {"quant_method": METHOD, "version": _VERSION, "formats": formats}


def own_scheme(config: Mapping[str, Any], refuse: Callable[[str], NoReturn]) -> QuantizationScheme:
    """Read a `quantization_config`; `refuse` raises the error of what is not understood."""
    if config.get("version") != _VERSION:
        refuse(f"has version {shown(config.get('version'))} of this format, and {_VERSION} is read")
    formats: Sequence[Any] = config.get("formats") or ()
    found = []
    for each in formats:
        is_right = isinstance(each, dict) and each.get("codes") in set(CodeType)
        group = each.get("group_size") if is_right else None
        if not isinstance(group, int) or group < 2 or not isinstance(each.get("targets"), list):
            refuse(f"has a format that is not understood: {shown(each)}")
        codes, has_zeros = CodeType(each["codes"]), bool(each.get("has_offsets"))
        stored = StoredFormat(Layout.OWN, codes, group, has_zeros=has_zeros)
        found.append(TargetedFormat(tuple(each["targets"]), stored))
    return QuantizationScheme(METHOD, tuple(found))
