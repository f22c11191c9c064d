"""The form that weights keep on a device whose host is as this one. No torch."""

from __future__ import annotations

from kvtransfer.common.compiler import find_compiler
from kvtransfer.common.host import cpu_flags
from workers.model.quantization.weight_form import WeightForm


def form_on_device(weight_dtype: str, device: str) -> WeightForm:
    """Return the form of weights for a pool's `weight_dtype` on a device of this kind."""
    can_compile = find_compiler() is not None and "avx2" in cpu_flags()
    return WeightForm(weight_dtype).on(device, can_compile=can_compile)
