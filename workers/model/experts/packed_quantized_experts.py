"""Experts with quantized weights for the CPU kernels of `native/experts.h`, which compute all in one call."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model import native
from workers.model.experts.expert_products import CountingExperts
from workers.model.experts.packed_experts import (
    ACTIVATIONS,
    NativeExperts,
    down_bias_of,
    gate_up_bias_of,
    run_experts,
)
from workers.model.experts.quantized_experts import QuantizedExpertWeights
from workers.model.experts.routing import Routing
from workers.model.products import PANEL, allocate_panels
from workers.model.quantization.packed_codes import STEP_INPUTS, PackedForm
from workers.model.quantization.packed_product import NativeForm
from workers.model.quantization.quantized_weight import QuantizedWeight

_HALF = PANEL // 2


class _Panels:
    """The panels of one weight of all experts, uint8 [num_experts, num_panels, num_bytes]."""

    def __init__(self, num_experts: int, num_panels: int, form: PackedForm) -> None:
        size = num_experts, num_panels, form.num_panel_bytes
        self.of_experts = allocate_panels(num_experts * num_panels * form.num_panel_bytes, torch.uint8).view(
            size
        )
        self.form, self.native_form = form, NativeForm.of(form)
        addresses = (of_expert.data_ptr() for of_expert in self.of_experts)
        self.addresses = (ctypes.c_void_p * num_experts)(*addresses)

    def pack(self, weights: Sequence[QuantizedWeight], width: int, offset: int) -> None:
        """Pack the rows of each expert's weight as `width` outputs of a panel, from `offset` on."""
        for weight, panels in zip(weights, self.of_experts, strict=True):
            self.form.pack(weight, panels, width, offset)


class PackedQuantizedExperts(CountingExperts):
    """Experts with panels of codes. A token's result depends neither on the other tokens nor on the number
    of threads."""

    def __init__(
        self, kernels: native.Kernels, weights: QuantizedExpertWeights, gate_up: PackedForm, down: PackedForm
    ) -> None:
        """Pack the weights, whose forms are `gate_up` and `down`."""
        self.num_experts = len(weights.ups)
        size, self.hidden_size = weights.ups[0].shape
        width = _HALF if weights.gates else PANEL
        gate_up_panels, down_panels = -(-size // width), -(-self.hidden_size // PANEL)
        self._gate_up = _Panels(self.num_experts, gate_up_panels, gate_up)
        if weights.gates:
            self._gate_up.pack(weights.gates, _HALF, 0)
        self._gate_up.pack(weights.ups, width, PANEL - width)
        assert weights.gates or weights.gate_up_bias is None
        self._down = _Panels(self.num_experts, down_panels, down)
        self._down.pack(weights.downs, PANEL, 0)
        self._biases = (
            gate_up_bias_of(weights.gate_up_bias, gate_up_panels),
            down_bias_of(weights.down_bias, down_panels),
        )
        self._experts: dict[torch.dtype, NativeExperts] = {}
        self._sizes = self.num_experts, self.hidden_size, size, self.hidden_size
        self._activation, self._clamp = ACTIVATIONS[weights.activation], weights.clamp
        self.counts = torch.zeros(self.num_experts, dtype=torch.int64)
        self.kernels = kernels
        self._run = kernels.library.tandem_run_experts

    def address_for(self, dtype: torch.dtype) -> int:
        """Return the address at which the kernels find the experts, for rows of `dtype`, while this object
        lives."""
        return ctypes.addressof(self._experts_for(dtype))

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        if x.dtype not in native.DTYPES:
            return self(x.float(), routing).to(x.dtype)
        return self._sum(x, routing, torch.empty_like(x), is_added=False)

    def add_to(self, hidden: Tensor, x: Tensor, routing: Routing) -> Tensor | None:
        if x.dtype not in native.DTYPES:
            return self(x, routing)
        self._sum(x, routing, hidden, is_added=True)
        return None

    def _sum(self, x: Tensor, routing: Routing, out: Tensor, *, is_added: bool) -> Tensor:
        assert x.shape == out.shape == (len(x), self.hidden_size), (x.shape, out.shape)
        assert x.dtype == out.dtype
        assert x.stride(1) == out.stride(1) == 1
        native_experts = self._experts_for(x.dtype)
        run_experts(self._run, native_experts, routing, x, out, self.counts, is_added=is_added)
        return out

    def _experts_for(self, dtype: torch.dtype) -> NativeExperts:
        """Describe the experts for rows of `dtype`, of which a model has one."""
        if dtype not in self._experts:
            gate_up_bias, down_bias = self._biases
            self._biases = (
                None if gate_up_bias is None else gate_up_bias.to(dtype),
                None if down_bias is None else down_bias.to(dtype),
            )
            self._experts = {
                dtype: NativeExperts(
                    ctypes.addressof(self._gate_up.addresses),
                    ctypes.addressof(self._down.addresses),
                    *(None if bias is None else bias.data_ptr() for bias in self._biases),
                    *self._sizes,
                    self._activation,
                    dtype == torch.bfloat16,
                    *self._clamp,
                    ctypes.addressof(self._gate_up.native_form),
                    ctypes.addressof(self._down.native_form),
                )
            }
        return self._experts[dtype]


def packed_quantized_experts(weights: QuantizedExpertWeights) -> PackedQuantizedExperts | None:
    """Return the experts by the kernels; None where there are none, or none for these forms."""
    kernels = native.load() if weights.ups[0].packed.device.type == "cpu" else None
    if kernels is None:
        return None
    # What is read when it is taken is taken once.
    taken = dataclasses.replace(
        weights, gates=list(weights.gates), ups=list(weights.ups), downs=list(weights.downs)
    )
    gate_up, down = _form_of([*taken.gates, *taken.ups]), _form_of(taken.downs)
    if gate_up is None or down is None:
        return None
    return PackedQuantizedExperts(kernels, taken, gate_up, down)


def _form_of(weights: Sequence[QuantizedWeight]) -> PackedForm | None:
    """Return the form of the weights, whose inputs are in their order and need none beside them."""
    first = weights[0]
    alike = all((it.codes, it.group) == (first.codes, first.group) for it in weights)
    have_offsets = {it.offsets is not None for it in weights}
    if not alike or len(have_offsets) > 1 or any(it.order is not None for it in weights):
        return None
    return None if first.group % STEP_INPUTS else PackedForm.of(weights)
