"""Decoder layers by the CPU kernels, each in one call: in a step of few tokens, calling their parts one by
one takes a tenth of the time."""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model import native
from workers.model.attention.cpu_backend import CpuPlan
from workers.model.attention.interface import AttentionPlan, LayerAttention
from workers.model.experts.packed_mixture import PackedMixture
from workers.model.products import PackedLinear, Workspace
from workers.model.quantization.packed_product import PackedQuantizedLinear
from workers.model.row_norms import RowNorms
from workers.model.weights import BlockNorms

NativeProduct = PackedLinear | PackedQuantizedLinear


class PackedLayer(NamedTuple):
    """The operands of a decoder layer, of one rank alone. In a layer with a `mixture` of experts, `gate_up`
    and `down` are of those that all tokens share, if there are any."""

    qkv: NativeProduct
    output: NativeProduct
    gate_up: NativeProduct | None
    down: NativeProduct | None
    norms: BlockNorms
    row_norms: RowNorms | None
    attention: LayerAttention
    mixture: PackedMixture | None = None
    # The product whose sigmoid multiplies what shared experts give.
    shared_gate: NativeProduct | None = None


_OPERANDS = ("qkv", "output", "gate_up", "down", "shared_gate", "mixture")
_BLOCK_NORMS = tuple(field.name for field in dataclasses.fields(BlockNorms))


class _Layer(ctypes.Structure):
    """`DecoderLayer` of `native/decoder_layer.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _OPERANDS),
        *((name, native.NormArguments) for name in (*_BLOCK_NORMS, "query_rows", "key_rows")),
        ("rotated", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("index", ctypes.c_int64),
        ("activation", ctypes.c_int64),
    )


class _StepShape(NamedTuple):
    """The columns that the kernels write for each token, as many as the widest layer needs."""

    normed: int
    qkv: int
    mixed: int
    gated: int
    sums: int

    @staticmethod
    def of(layers: Sequence[PackedLayer]) -> _StepShape:
        layer = layers[0]
        gated = max(0 if layer.down is None else layer.down.num_inputs for layer in layers)
        hidden_size = layer.qkv.num_inputs
        sums = hidden_size if any(layer.mixture is not None for layer in layers) else 0
        return _StepShape(hidden_size, layer.qkv.num_outputs, layer.output.num_inputs, gated, sums)


class _Step(ctypes.Structure):
    """`LayerStep` of `native/decoder_layer.h`."""

    _fields_ = (
        ("tokens", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _StepShape._fields),
        ("pieces", ctypes.c_void_p),
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
        self._shape = _StepShape.of(layers)
        # The arguments for the attention backends that the last step was planned by.
        self._arguments: _Arguments | None = None

    @staticmethod
    def serves(plan: AttentionPlan) -> bool:
        """Whether the attention of a step is that of the kernels, in every group of layers."""
        return all(part is None or isinstance(part, CpuPlan) for part in plan.parts)

    def run(self, hidden: Tensor, plan: AttentionPlan, num_layers: int) -> None:
        """Run the first `num_layers` layers over `hidden` [num_tokens, hidden_size], in place."""
        parts = [part if isinstance(part, CpuPlan) else None for part in plan.parts]
        first = next(part for part in parts if part is not None)
        assert hidden.shape == (first.num_tokens, self._shape.normed)
        assert hidden.stride(1) == 1
        assert hidden.dtype == first.backend.dtype
        if self._arguments is None or not self._arguments.are_for(parts):
            self._arguments = _Arguments(self._layers, plan, parts)
        widths = self._shape._asdict()
        memory = {name: self._workspace.take(name, hidden, width) for name, width in widths.items()}
        step = _Step(
            pieces=ctypes.addressof(plan.marks.pieces),
            **{name: tensor.data_ptr() for name, tensor in memory.items()},
        )
        address, rows, stride = ctypes.addressof(step), hidden.data_ptr(), hidden.stride(0)
        known = self._arguments
        for (group, layer), arguments in zip(known.local[:num_layers], known.layers, strict=False):
            part = parts[group]
            assert part is not None
            tasks = part.window_to_tasks[layer.window]
            step.piece_tasks = tasks.piece_tasks
            step.tokens = ctypes.addressof(part.rotations[layer.rotation])
            self._run(ctypes.addressof(arguments), address, ctypes.addressof(tasks.step), rows, stride)
            plan.marks.mark_layer()


def _address(operand: NativeProduct | PackedMixture | None, dtype: torch.dtype) -> int | None:
    if isinstance(operand, PackedQuantizedLinear | PackedMixture):
        return operand.address_for(dtype)
    return None if operand is None else operand.address


def _norms(layer: PackedLayer) -> dict[str, native.NormArguments]:
    hidden_size = layer.qkv.num_inputs
    norms = {name: native.NormArguments.of(getattr(layer.norms, name), hidden_size) for name in _BLOCK_NORMS}
    if (rows := layer.row_norms) is not None:
        norms["query_rows"] = native.NormArguments.of(rows.queries, len(rows.queries.weight))
        norms["key_rows"] = native.NormArguments.of(rows.keys, len(rows.keys.weight))
    return norms


class _Arguments:
    """The arguments of the kernels for the layers over the KV of the backends that have planned `parts`, one
    for each group of layers, whose lives this does not prolong. `local` are the group and the layer there of
    each."""

    def __init__(
        self, layers: Sequence[PackedLayer], plan: AttentionPlan, parts: Sequence[CpuPlan | None]
    ) -> None:
        self._backends = [None if part is None else weakref.ref(part.backend) for part in parts]
        self.local = [plan.local(layer.attention) for layer in layers]
        backends = [part.backend for group, _ in self.local if (part := parts[group]) is not None]
        self._rotated = [its.rotated(layer) for its, (_, layer) in zip(backends, self.local, strict=True)]
        self.layers = [
            _Layer(
                **{name: _address(getattr(layer, name), its.dtype) for name in _OPERANDS},
                **_norms(layer),
                rotated=ctypes.addressof(rotated),
                sinks=its.sinks_address(local),
                index=local.index,
                activation=0 if layer.gate_up is None else layer.gate_up.epilogue,
            )
            for layer, its, (_, local), rotated in zip(
                layers, backends, self.local, self._rotated, strict=True
            )
        ]
        heads, kv = backends[0].shape.num_heads, backends[0].kv_shape
        columns = (heads + 2 * kv.num_kv_heads) * kv.head_dim, heads * kv.head_dim
        assert all((it.qkv.num_outputs, it.output.num_inputs) == columns for it in layers)

    def are_for(self, parts: Sequence[CpuPlan | None]) -> bool:
        """Whether these backends have planned the last step too."""
        return len(parts) == len(self._backends) and all(
            (part and part.backend) is (known and known())
            for part, known in zip(parts, self._backends, strict=True)
        )
