"""The forms of quantized weights that products are computed with as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.model import cuda, native
from workers.model.quantization.integer_product import rounds_inputs
from workers.model.quantization.packed_codes import STEP_INPUTS
from workers.model.quantization.quantized_weight import QuantizedWeight


def has_products(weight: QuantizedWeight) -> bool:
    """Whether products with weights of this form are computed where the weight is: by kernels or, as rounded
    inputs have no dequantized weights that give the same, by torch."""
    device = weight.packed.device
    if cuda.serves(device) or (device.type == "cpu" and rounds_inputs(weight)):
        return True
    is_served = weight.group % STEP_INPUTS == 0 or weight.group == weight.num_inputs
    return is_served and device.type == "cpu" and native.load() is not None


def has_experts(weight: QuantizedWeight) -> bool:
    """Whether experts with weights of this form can be computed where the weight is."""
    device = weight.packed.device
    has_kernels = cuda.serves(device) or device.type != "cpu" or native.load() is not None
    return has_kernels and weight.order is None and has_products(weight)


def are_alike(parts: Sequence[QuantizedWeight]) -> bool:
    """Whether the parts of a weight have one form, as `QuantizedWeight.joined` needs it."""
    first = parts[0]
    forms = {(it.codes, it.group, it.num_inputs, it.quantizes_inputs, it.offsets is None) for it in parts}
    if len(forms) > 1 or any((it.order is None) != (first.order is None) for it in parts):
        return False
    return first.order is None or all(
        it.order is not None and torch.equal(it.order, first.order) for it in parts
    )
