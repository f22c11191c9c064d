"""Decoder layers by the CPU kernels, each in one call: in a step of few tokens, calling their parts one by
one takes a tenth of the time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

from torch import Tensor

from workers.model import native
from workers.model.attention.cpu_backend import CpuAttention, CpuPlan
from workers.model.attention.interface import AttentionPlan, LayerAttention
from workers.model.products import PackedLinear, Workspace


class PackedLayer(NamedTuple):
    """What a decoder layer computes with, of one rank alone. Norms are [hidden_size]."""

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: Tensor
    post_norm: Tensor
    attention: LayerAttention
    eps: float


class _Layer(ctypes.Structure):
    """`DecoderLayer` of `native/decoder_layer.h`."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("qkv", "output", "gate_up", "down", "input_norm", "post_norm", "rotated")
        ),
        ("index", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    """`LayerStep` of `native/decoder_layer.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "normed", "qkv", "mixed", "gated", "pieces")),
        ("piece_tasks", ctypes.c_int64),
    )


class NativeLayers:
    """Runs `layers`, whose scratch memory is the decoder's `workspace`."""

    def __init__(self, layers: Sequence[PackedLayer], workspace: Workspace) -> None:
        kernels = native.load()
        assert kernels is not None
        self._layers = layers
        self._workspace = workspace
        self._run = kernels.library.tandem_run_layer
        self._run.argtypes = [*(ctypes.c_void_p,) * 4, ctypes.c_int64]
        # Of the attention backend that the last step was planned by.
        self._backend: CpuAttention | None = None
        self._arguments: list[_Layer] = []

    @staticmethod
    def serves(plan: AttentionPlan) -> TypeGuard[CpuPlan]:
        """Whether the attention of a step is that of the kernels."""
        return isinstance(plan, CpuPlan)

    def run(self, hidden: Tensor, plan: CpuPlan, num_layers: int) -> None:
        """Run the first `num_layers` layers over `hidden` [num_tokens, hidden_size], in place."""
        assert hidden.stride(1) == 1
        if plan.backend is not self._backend:
            self._arguments = [_arguments(layer, plan.backend) for layer in self._layers]
            self._backend = plan.backend
        first = self._layers[0]
        widths = {
            "normed": hidden.shape[1],
            "qkv": first.qkv.num_outputs,
            "mixed": first.output.num_inputs,
            "gated": first.down.num_inputs,
        }
        memory = {name: self._workspace.take(name, hidden, width) for name, width in widths.items()}
        step = _Step(
            tokens=ctypes.addressof(plan.tokens),
            pieces=ctypes.addressof(plan.marks.pieces),
            **{name: tensor.data_ptr() for name, tensor in memory.items()},
        )
        address, rows, stride = ctypes.addressof(step), hidden.data_ptr(), hidden.stride(0)
        for layer, arguments in zip(self._layers[:num_layers], self._arguments, strict=False):
            tasks = plan.window_to_tasks[layer.attention.window]
            step.piece_tasks = tasks.piece_tasks
            self._run(ctypes.addressof(arguments), address, ctypes.addressof(tasks.step), rows, stride)
            plan.marks.mark_layer()


def _arguments(layer: PackedLayer, backend: CpuAttention) -> _Layer:
    products = {
        "qkv": layer.qkv, "output": layer.output, "gate_up": layer.gate_up, "down": layer.down
    }  # fmt: skip
    return _Layer(
        **{name: product.address for name, product in products.items()},
        input_norm=layer.input_norm.data_ptr(),
        post_norm=layer.post_norm.data_ptr(),
        rotated=ctypes.addressof(backend.rotated(layer.attention)),
        index=layer.attention.index,
        eps=layer.eps,
    )
