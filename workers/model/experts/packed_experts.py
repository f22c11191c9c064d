"""Experts with packed weights, for the CPU kernels of `native/experts.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import native
from workers.model.experts.expert_products import (
    CopyableExperts,
    CountingExperts,
    ExpertRows,
    ExpertWeights,
    ReadableExperts,
)
from workers.model.experts.mixture_shape import ExpertActivation
from workers.model.experts.routing import Routing
from workers.model.products import PANEL, allocate_panels

_HALF = PANEL // 2
ACTIVATIONS: dict[ExpertActivation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "relu2": 3}


class NativeExperts(ctypes.Structure):
    """`Experts` of `native/experts.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up_panels", "down_panels", "gate_up_bias", "down_bias")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_experts", "num_inputs", "size", "num_outputs", "activation", "is_bf16")
        ),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("gate_up_form", "down_form")),
    )


class NativeChoice(ctypes.Structure):
    """`ChosenExperts` of `native/experts.h`."""

    _fields_ = (
        ("experts", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("num_chosen", ctypes.c_int64),
    )


class _Panels:
    """The panels of one weight of all experts, which follow one another. `num_inputs` is even for
    bfloat16."""

    def __init__(
        self, num_experts: int, num_panels: int, num_inputs: int, dtype: torch.dtype, kernels: native.Kernels
    ) -> None:
        self._pack = kernels.library.tandem_pack_rows
        self._is_bf16 = dtype == torch.bfloat16
        panels = allocate_panels(num_experts * num_panels * num_inputs * PANEL, dtype)
        self._of_experts = panels.view(num_experts, -1)
        self._num_words = num_inputs // 2 if self._is_bf16 else num_inputs
        addresses = (of_expert.data_ptr() for of_expert in self._of_experts)
        self.addresses = (ctypes.c_void_p * num_experts)(*addresses)

    def pack(self, weights: Sequence[Tensor], width: int, offset: int) -> None:
        """Pack the rows of each expert's weight as `width` outputs of a panel, from `offset` on."""
        for rows, panels in zip(weights, self._of_experts, strict=True):
            assert rows.stride(1) == 1
            self._pack(
                ctypes.c_void_p(rows.data_ptr()),
                *(ctypes.c_int64(value) for value in (rows.stride(0), *rows.shape, width, offset)),
                ctypes.c_int64(self._is_bf16),
                ctypes.c_void_p(panels.data_ptr()),
            )

    def of(self, expert: int) -> Tensor:
        """Return the panels of an expert, flat."""
        return self._of_experts[expert]

    def outputs(self, expert: int) -> Tensor:
        """Return the rows of an expert in the order of the panels' outputs, [num_panels, PANEL, num_inputs],
        with those of padding."""
        # Inputs of bfloat16 lie in pairs, which are four bytes as well.
        panels = self._of_experts[expert].view(torch.float32).view(-1, self._num_words, PANEL)
        rows = panels.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        return rows.view(self._of_experts.dtype)


class PackedExperts(CountingExperts, ReadableExperts, CopyableExperts):
    """Experts with packed float32 or bfloat16 weights, on a CPU. A token's result depends neither on the
    other tokens nor on the number of threads."""

    def __init__(self, kernels: native.Kernels, weights: ExpertWeights) -> None:
        """Pack the weights from where they are."""
        self.num_experts = len(weights.ups)
        size, self.hidden_size = weights.ups[0].shape
        self._size, self._is_gated = size, bool(weights.gates)
        self.dtype = dtype = weights.ups[0].dtype
        # A pair of bfloat16 inputs lies side by side: the last one is padded with zero.
        is_paired = dtype == torch.bfloat16
        self.is_padded = is_paired and self.hidden_size % 2 == 1
        num_inputs, padded_size = self.hidden_size + self.is_padded, size + (is_paired and size % 2)
        width = _HALF if self._is_gated else PANEL
        gate_up_panels, down_panels = -(-size // width), -(-self.hidden_size // PANEL)
        self._gate_up = _Panels(self.num_experts, gate_up_panels, num_inputs, dtype, kernels)
        if self._is_gated:
            self._gate_up.pack(weights.gates, _HALF, 0)
        self._gate_up.pack(weights.ups, width, PANEL - width)
        assert self._is_gated or weights.gate_up_bias is None
        self._down = _Panels(self.num_experts, down_panels, padded_size, dtype, kernels)
        self._down.pack(weights.downs, PANEL, 0)
        self._biases = (
            gate_up_bias_of(weights.gate_up_bias, gate_up_panels),
            down_bias_of(weights.down_bias, down_panels),
        )
        self._experts = NativeExperts(
            ctypes.addressof(self._gate_up.addresses),
            ctypes.addressof(self._down.addresses),
            *(None if bias is None else bias.data_ptr() for bias in self._biases),
            self.num_experts,
            num_inputs,
            padded_size,
            self.hidden_size,
            ACTIVATIONS[weights.activation],
            is_paired,
            *weights.clamp,
        )
        self.counts = torch.zeros(self.num_experts, dtype=torch.int64)
        self.kernels = kernels
        self._run = kernels.library.tandem_run_experts

    def address_for(self, dtype: torch.dtype) -> int:
        """Return the address at which the kernels find the experts, for rows of their dtype, while this
        object lives."""
        assert dtype == self.dtype, dtype
        return ctypes.addressof(self._experts)

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return self._sum(x, routing, torch.empty(x.shape, dtype=self.dtype), is_added=False)

    def add_to(self, hidden: Tensor, x: Tensor, routing: Routing) -> None:
        self._sum(x, routing, hidden, is_added=True)

    def rows(self, expert: int) -> ExpertRows:
        gate_up_bias, down_bias = (None if bias is None else bias[expert] for bias in self._biases)
        down = self._down.outputs(expert).flatten(0, 1)[: self.hidden_size, : self._size]
        return ExpertRows(
            self._gates_and_ups(self._gate_up.outputs(expert))[:, : self.hidden_size],
            down.contiguous(),
            None if gate_up_bias is None else self._gates_and_ups(gate_up_bias.view(-1, PANEL)),
            None if down_bias is None else down_bias[: self.hidden_size],
        )

    def memory(self, expert: int) -> list[Tensor]:
        biases = [bias[expert] for bias in self._biases if bias is not None]
        return [self._gate_up.of(expert), self._down.of(expert), *biases]

    def _gates_and_ups(self, outputs: Tensor) -> Tensor:
        """Bring outputs of panels [num_panels, PANEL, ...], gates and ups in turn, into the order of gates
        and then ups, [2 * size, ...]; ups alone are in it, [size, ...]."""
        if not self._is_gated:
            return outputs.flatten(0, 1)[: self._size]
        halves = outputs.view(-1, 2, _HALF, *outputs.shape[2:]).transpose(0, 1).flatten(1, 2)
        return halves[:, : self._size].flatten(0, 1)

    def _sum(self, x: Tensor, routing: Routing, out: Tensor, *, is_added: bool) -> Tensor:
        assert x.dtype == out.dtype == self.dtype, (x.dtype, out.dtype)
        assert x.shape == out.shape == (len(x), self.hidden_size), (x.shape, out.shape)
        assert out.stride(1) == 1
        if self.is_padded:
            x = F.pad(x, (0, 1))
        elif x.stride(1) != 1:
            x = x.contiguous()
        run_experts(self._run, self._experts, routing, x, out, self.counts, is_added=is_added)
        return out


def run_experts(
    run: Callable[..., object],
    native_experts: NativeExperts,
    routing: Routing,
    x: Tensor,
    out: Tensor,
    counts: Tensor,
    *,
    is_added: bool,
) -> None:
    """Write the sums of the chosen experts of rows x into `out`, or add them to it, by the kernels' function
    `run`; and count the rows of each expert."""
    experts, weights = routing.experts.contiguous(), routing.weights.contiguous()
    assert experts.shape == weights.shape == (len(x), experts.shape[1])
    assert (experts.dtype, weights.dtype) == (torch.int32, torch.float32)
    chosen = NativeChoice(experts.data_ptr(), weights.data_ptr(), experts.shape[1])
    run(
        ctypes.byref(native_experts),
        ctypes.byref(chosen),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(x.stride(0)),
        ctypes.c_int64(len(x)),
        ctypes.c_int64(is_added),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(out.stride(0)),
        ctypes.c_void_p(counts.data_ptr()),
    )


def gate_up_bias_of(bias: Tensor | None, num_panels: int) -> Tensor | None:
    """Return the bias in the order of the panels' outputs, 16 of gates and 16 of ups in each."""
    if bias is None:
        return None
    num_experts, size = len(bias), bias.shape[1] // 2
    halves = F.pad(bias.view(num_experts, 2, size), (0, num_panels * _HALF - size))
    return halves.view(num_experts, 2, num_panels, _HALF).transpose(1, 2).contiguous()


def down_bias_of(bias: Tensor | None, num_panels: int) -> Tensor | None:
    """Return the bias, which covers whole panels."""
    return None if bias is None else F.pad(bias, (0, num_panels * PANEL - bias.shape[1])).contiguous()
