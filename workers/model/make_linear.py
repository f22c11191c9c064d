"""Make the linear products of the decoder: by the kernels of the CPU or of CUDA where they serve, else by
torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from workers.errors import WorkerError
from workers.model import cuda, native
from workers.model.native.isa import usable_isas
from workers.model.products import GatedActivation, InvariantLinear, Linear, PackedLinear, TorchLinear, Weight
from workers.model.quantization.device_linear import make_device_linear
from workers.model.quantization.integer_product import IntegerLinear, rounds_inputs
from workers.model.quantization.packed_product import packed_quantized
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.torch_product import DequantizingLinear
from workers.model.thin_linear import Surroundings, ThinLinear

_Part = TypeVar("_Part", Tensor, QuantizedWeight)


def make_linear(
    weight: Weight | QuantizedWeight | Sequence[QuantizedWeight],
    bias: Tensor | None = None,
    *,
    gate: GatedActivation | None = None,
    is_deterministic: bool = False,
    around: Surroundings | None = None,
) -> Linear:
    """Return the product with `weight` and `bias` [num_outputs], packed if there are CPU kernels for it.
    Parts are copied; those of a product with the activation of a `gate` are gate and up. `is_deterministic`:
    a row's result shall not depend on the other rows, where `refuse_nondeterministic` lets it be had.
    `around`: what is around a product of a layer that decodes, which kernels of few rows compute as well."""
    parts = (weight,) if isinstance(weight, Tensor | QuantizedWeight) else tuple(weight)
    if isinstance(parts[0], QuantizedWeight):
        return _make_quantized(_all_of(QuantizedWeight, parts), bias, gate, is_deterministic=is_deterministic)
    parts = _all_of(Tensor, parts)
    if native.serves(parts[0].device, parts[0].dtype):
        kernels = native.load()
        assert kernels is not None
        return PackedLinear(kernels, parts, bias, gate=gate)
    whole = weight if isinstance(weight, Tensor) else torch.cat(parts)
    if is_deterministic and cuda.serves(whole.device):
        return InvariantLinear(whole, bias, gate=gate)
    if around is not None and cuda.serves(whole.device):
        return ThinLinear(whole, bias, gate=gate, surroundings=around)
    return TorchLinear(whole, bias, gate=gate)


def _make_quantized(
    parts: tuple[QuantizedWeight, ...],
    bias: Tensor | None,
    gate: GatedActivation | None,
    *,
    is_deterministic: bool,
) -> Linear:
    packed = packed_quantized(parts, bias, gate)
    if packed is not None:
        return packed
    whole = QuantizedWeight.joined(parts)
    assert whole is not None, "the parts of a product have one form"
    if cuda.serves(whole.packed.device):
        return make_device_linear(whole, bias, gate=gate, is_deterministic=is_deterministic)
    if rounds_inputs(whole):
        return IntegerLinear(whole, bias, gate=gate)
    return DequantizingLinear(whole, bias, gate=gate)


def _all_of(kind: type[_Part], parts: tuple[object, ...]) -> tuple[_Part, ...]:
    assert all(isinstance(part, kind) for part in parts), "parts of different kinds"
    return cast(tuple[_Part, ...], parts)


def refuse_nondeterministic(device: torch.device, dtype: torch.dtype) -> None:
    """Raise WorkerError, naming the remedy, where a row's product may depend on the other rows."""
    name = str(dtype).removeprefix("torch.")
    if cuda.serves(device):
        return
    if device.type != "cpu":
        problem = f"there are no such products on {device.type}; set device: cpu or cuda"
    elif dtype not in native.DTYPES:
        problem = f"there are no such products of {name}; set dtype: bf16 or fp32"
    elif not usable_isas():
        problem = "there are no such products for this CPU, which has no AVX2"
    elif native.load() is None:
        problem = "the kernels could not be compiled; install a C++ compiler (Debian: g++)"
    else:
        return
    raise WorkerError(f"deterministic: {problem}, or set deterministic: false")
