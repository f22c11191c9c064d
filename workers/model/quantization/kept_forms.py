"""The forms of quantized weights that products are computed with as they are."""

from __future__ import annotations

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
