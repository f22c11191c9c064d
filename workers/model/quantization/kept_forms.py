"""The forms of quantized weights that products are computed with as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.model import cuda, native
from workers.model.quantization.packed_codes import STEP_INPUTS
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.weight_form import EXPERTS_ON


def has_products(weight: QuantizedWeight) -> bool:
    """Whether there are kernels that compute products with weights of this form, where the weight is."""
    device = weight.packed.device
    if cuda.serves(device):
        return True
    is_served = weight.group % STEP_INPUTS == 0 or weight.group == weight.num_inputs
    return is_served and device.type == "cpu" and native.load() is not None


def has_experts(weight: QuantizedWeight) -> bool:
    """Whether experts with weights of this form can be computed where the weight is."""
    return weight.packed.device.type in EXPERTS_ON and weight.order is None and has_products(weight)


def are_alike(parts: Sequence[QuantizedWeight]) -> bool:
    """Whether the parts of a weight have one form, as `QuantizedWeight.joined` needs it."""
    first = parts[0]
    forms = {(it.codes, it.group, it.num_inputs, it.quantizes_inputs, it.offsets is None) for it in parts}
    if len(forms) > 1 or any((it.order is None) != (first.order is None) for it in parts):
        return False
    return first.order is None or all(
        it.order is not None and torch.equal(it.order, first.order) for it in parts
    )
