"""Linear products with quantized weights on CUDA, in Triton or, where it has them, by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.finish import Finish
from workers.model.products import GatedActivation, Linear, ScaledLinear, gate_mul
from workers.model.quantization.device_weight import DeviceWeight
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight

# The first compute capability whose tensor cores multiply float8.
_FLOAT8_CAPABILITY = (8, 9)
# The sizes of float8 products by torch are multiples of this.
_FLOAT8_SIZE = 16
# Fewer rows take less time in Triton: weights are all that they read, and the rows are rounded in one launch.
_LEAST_SCALED_ROWS = 65


def make_device_linear(
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    gate: GatedActivation | None = None,
    is_deterministic: bool = False,
) -> Linear:
    """Return the product with a weight on a device that `workers.model.cuda` serves. `is_deterministic`: a
    row's result does not depend on the other rows."""
    if not is_deterministic and _is_scaled_float8(weight):
        return Float8Linear(weight, bias, gate=gate)
    return DeviceQuantizedLinear(weight, bias, gate=gate, is_deterministic=is_deterministic)


def _is_scaled_float8(weight: QuantizedWeight) -> bool:
    """Whether torch multiplies the weight's codes with inputs that are rounded row by row."""
    has_form = weight.codes is Codes.E4M3 and weight.quantizes_inputs and weight.group == weight.num_inputs
    has_sizes = all(size % _FLOAT8_SIZE == 0 for size in weight.shape)
    is_plain = weight.offsets is None and weight.order is None
    return has_form and has_sizes and is_plain and has_float8_products(weight.packed.device)


def has_float8_products(device: torch.device) -> bool:
    """Whether torch has products of float8 with a scale for each row on this device."""
    if device.type != "cuda" or not hasattr(F, "scaled_mm"):
        return False
    return torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY


class DeviceQuantizedLinear(Linear):
    """A product by Triton, whose codes are decoded within the product.

    The inputs of a weight that `quantizes_inputs` are rounded first, row by row. Those of int8 are multiplied
    as integers where the weight's groups allow it."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        gate: GatedActivation | None = None,
        is_deterministic: bool = False,
    ) -> None:
        """`is_deterministic`: a row's result depends on nothing else."""
        from workers.model.cuda import quantized_product

        self._kernels = quantized_product
        self._weight, self._bias, self._gate = DeviceWeight.of(weight), bias, gate
        self._is_fixed = is_deterministic
        self._has_integers = quantized_product.multiplies_integers(self._weight)
        self.num_outputs, self.num_inputs = weight.shape

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        result = x.new_empty(x.shape[0], self.num_outputs) if out is None else out
        self._multiply(x, result)
        return result

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        self._multiply(x, hidden, "add")

    def gated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        result = x.new_empty(x.shape[0], self.num_outputs // 2) if out is None else out
        self._multiply(x, result, self._gate or "silu")
        return result

    def floats(self, x: Tensor) -> Tensor:
        result = x.new_empty(x.shape[0], self.num_outputs, dtype=torch.float32)
        self._multiply(x, result)
        return result

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows in float32, which holds them best."""
        return self._kernels.look_up(self._weight, ids)

    def _multiply(self, x: Tensor, out: Tensor, finish: Finish = "store") -> None:
        scales = None
        if self._weight.order is not None:
            x = x.index_select(1, self._weight.order)
        if self._weight.quantizes_inputs:
            dtype = torch.int8 if self._has_integers else x.dtype
            x, scales = self._kernels.round_rows(x, self._weight.codes, dtype)
        self._kernels.multiply(
            x, self._weight, self._bias, out, row_scales=scales, finish=finish, is_fixed=self._is_fixed
        )


class Float8Linear(DeviceQuantizedLinear):
    """A product whose rows, where they are many and of bfloat16, are multiplied as float8 by torch."""

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None = None, *, gate: GatedActivation | None = None
    ) -> None:
        super().__init__(weight, bias, gate=gate)
        codes = weight.packed.view(torch.float8_e4m3fn)
        self._scaled = ScaledLinear(codes, weight.scales.view(-1), bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._scaled(x, out) if _is_scaled(x) else super().__call__(x, out)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        if _is_scaled(x):
            hidden.add_(self._scaled(x))
        else:
            super().add_to(hidden, x)

    def gated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if _is_scaled(x):
            return gate_mul(self._scaled(x), self._gate or "silu", out)
        return super().gated(x, out)


def _is_scaled(x: Tensor) -> bool:
    return x.shape[0] >= _LEAST_SCALED_ROWS and x.dtype == torch.bfloat16
