"""The forms of quantized weights that products are computed with as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.model.quantization.quantized_weight import QuantizedWeight


def has_products(weight: QuantizedWeight) -> bool:
    """Whether there are products for weights of this form where it is."""
    return False


def are_alike(parts: Sequence[QuantizedWeight]) -> bool:
    """Whether the parts of a weight have one form, as `QuantizedWeight.joined` needs it."""
    first = parts[0]
    forms = {(it.codes, it.group, it.num_inputs, it.quantizes_inputs, it.offsets is None) for it in parts}
    if len(forms) > 1 or any((it.order is None) != (first.order is None) for it in parts):
        return False
    return first.order is None or all(
        it.order is not None and torch.equal(it.order, first.order) for it in parts
    )
