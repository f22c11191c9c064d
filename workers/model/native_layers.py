"""Decoder layers by the CPU kernels, each in one call: in a step of few tokens, calling their parts one by
one takes a tenth of the time."""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model import native
from workers.model.attention.cpu_backend import CpuPlan
from workers.model.attention.groups_backend import GroupsPlan
from workers.model.attention.interface import AttentionBackend, AttentionPlan, LayerAttention
from workers.model.experts.packed_mixture import PackedMixture
from workers.model.products import PackedLinear, Workspace
from workers.model.quantization.packed_product import PackedQuantizedLinear
from workers.model.row_norms import RowNorms
from workers.model.state.native_states import StateSequences
from workers.model.state.packed_mixer import PackedMixer
from workers.model.weights import BlockNorms

NativeProduct = PackedLinear | PackedQuantizedLinear


# The most products of the hidden states that a layer may have in place of one.
MOST_PRODUCTS = 2


class PackedLayer(NamedTuple):
    """The operands of a decoder layer, of one rank alone. The outputs of `products` lie one after another:
    they are queries, keys and values, with gates of what attention gives behind them if `is_gated`, or what a
    `mixer` mixes by a state in place of attention. In a layer with a `mixture` of experts, `gate_up` and
    `down` are of those that all tokens share, if there are any; a layer may also have no feed-forward."""

    products: Sequence[NativeProduct]
    output: NativeProduct
    norms: BlockNorms
    row_norms: RowNorms | None
    attention: LayerAttention
    is_gated: bool = False
    mixer: PackedMixer | None = None
    gate_up: NativeProduct | None = None
    down: NativeProduct | None = None
    mixture: PackedMixture | None = None
    # The product whose sigmoid multiplies what shared experts give.
    shared_gate: NativeProduct | None = None

    @property
    def qkv(self) -> NativeProduct:
        """The first of the products."""
        return self.products[0]

    @property
    def others(self) -> NativeProduct | None:
        """The second of the products, if there is one."""
        return self.products[1] if len(self.products) == MOST_PRODUCTS else None

    @property
    def num_projected(self) -> int:
        """The columns of all products."""
        return sum(product.num_outputs for product in self.products)


_OPERANDS = ("qkv", "others", "output", "gate_up", "down", "shared_gate", "mixture")
_BLOCK_NORMS = tuple(field.name for field in dataclasses.fields(BlockNorms))


class _Layer(ctypes.Structure):
    """`DecoderLayer` of `native/decoder_layer.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_OPERANDS, "state")),
        *((name, native.NormArguments) for name in (*_BLOCK_NORMS, "query_rows", "key_rows")),
        ("rotated", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("index", "activation", "is_gated")),
    )


class _StepShape(NamedTuple):
    """The columns that the kernels write for each token, as many as the widest layer needs."""

    normed: int
    qkv: int
    mixed: int
    gated: int
    sums: int
    convolved: int

    @staticmethod
    def of(layers: Sequence[PackedLayer]) -> _StepShape:
        hidden_size = layers[0].qkv.num_inputs
        return _StepShape(
            hidden_size,
            max(layer.num_projected for layer in layers),
            max(layer.output.num_inputs for layer in layers),
            max(0 if layer.down is None else layer.down.num_inputs for layer in layers),
            hidden_size if any(layer.mixture is not None for layer in layers) else 0,
            max(0 if layer.mixer is None else layer.mixer.conv.num_channels for layer in layers),
        )


class _Step(ctypes.Structure):
    """`LayerStep` of `native/decoder_layer.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "sequences")),
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _StepShape._fields),
        ("pieces", ctypes.c_void_p),
        ("piece_tasks", ctypes.c_int64),
    )


class NativeLayers:
    """Runs those of a decoder's `layers` that are packed; None stands for each other layer. Their scratch
    memory is the decoder's `workspace`."""

    def __init__(self, layers: Sequence[PackedLayer | None], workspace: Workspace) -> None:
        kernels = native.load()
        assert kernels is not None
        self._layers = layers
        self._workspace = workspace
        self._run = kernels.library.tandem_run_layer
        self._run.argtypes = [*(ctypes.c_void_p,) * 4, ctypes.c_int64]
        self._shape = _StepShape.of([layer for layer in layers if layer is not None])
        # The arguments for the backend that the last step was planned by.
        self._arguments: _Arguments | None = None

    def begin(self, hidden: Tensor, plan: AttentionPlan) -> NativeStep | None:
        """Begin a step over `hidden` [num_tokens, hidden_size], which its layers change in place; None where
        the attention of a step is not that of the kernels, in every group of layers that attend."""
        if not all(part is None or isinstance(part, CpuPlan) for part in plan.parts):
            return None
        assert hidden.shape[1] == self._shape.normed
        assert hidden.stride(1) == 1
        if self._arguments is None or not self._arguments.are_for(plan):
            self._arguments = _Arguments(self._layers, plan, hidden.dtype)
        widths = self._shape._asdict()
        memory = {name: self._workspace.take(name, hidden, width) for name, width in widths.items()}
        return NativeStep(self._run, self._arguments, hidden, plan, memory)


class NativeStep:
    """One step of `NativeLayers`, with scratch `memory` by the names of `_StepShape`."""

    def __init__(
        self,
        run: Callable[..., None],
        arguments: _Arguments,
        hidden: Tensor,
        plan: AttentionPlan,
        memory: dict[str, Tensor],
    ) -> None:
        self._run, self._arguments, self._hidden, self._memory = run, arguments, hidden, memory
        self._parts = [part if isinstance(part, CpuPlan) else None for part in plan.parts]
        for part in filter(None, self._parts):
            assert (len(hidden), hidden.dtype) == (part.num_tokens, part.backend.dtype)
        self._step = _Step(
            num_rows=len(hidden),
            pieces=ctypes.addressof(plan.marks.pieces),
            **{name: tensor.data_ptr() for name, tensor in memory.items()},
        )
        if isinstance(plan, GroupsPlan) and (states := plan.state_step) is not None:
            assert len(hidden) == states.lengths.sum()
            self._sequences = StateSequences.of(states)
            self._step.sequences = ctypes.addressof(self._sequences)

    def has(self, number: int) -> bool:
        """Whether the layer of this number, in the decoder, is run in one call."""
        return self._arguments.layers[number] is not None

    def run(self, number: int) -> None:
        """Run one of these layers over the hidden states."""
        step, arguments = self._step, self._arguments.layers[number]
        assert arguments is not None
        group, layer = self._arguments.local[number]
        attention = None
        if (part := self._parts[group]) is not None:
            tasks = part.window_to_tasks[layer.window]
            step.piece_tasks = tasks.piece_tasks
            step.tokens = ctypes.addressof(part.rotations[layer.rotation])
            attention = ctypes.addressof(tasks.step)
        hidden = self._hidden
        addresses = ctypes.addressof(arguments), ctypes.addressof(step), attention
        self._run(*addresses, hidden.data_ptr(), hidden.stride(0))


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
    """The arguments of the kernels for the layers that are packed, over the KV and the states of the backend
    that has made `plan`, whose life this does not prolong. `local` are the group and the layer there of
    each."""

    def __init__(self, layers: Sequence[PackedLayer | None], plan: AttentionPlan, dtype: torch.dtype) -> None:
        self._backend = weakref.ref(_backend_of(plan))
        # Kept as long as the kernels read them.
        self._parts: list[ctypes.Structure] = []
        self.local: dict[int, tuple[int, LayerAttention]] = {}
        self.layers: list[_Layer | None] = []
        for number, layer in enumerate(layers):
            if layer is None:
                self.layers.append(None)
                continue
            self.local[number] = local = plan.local(layer.attention)
            self.layers.append(
                _Layer(
                    **{name: _address(getattr(layer, name), dtype) for name in _OPERANDS},
                    **_norms(layer),
                    **self._mixing(layer, plan, local, dtype),
                    activation=0 if layer.gate_up is None else layer.gate_up.epilogue,
                    is_gated=layer.is_gated,
                )
            )

    def _mixing(
        self, layer: PackedLayer, plan: AttentionPlan, local: tuple[int, LayerAttention], dtype: torch.dtype
    ) -> dict[str, int | None]:
        """Return the arguments of what mixes the tokens of a layer."""
        if (mixer := layer.mixer) is not None:
            assert isinstance(plan, GroupsPlan)
            assert mixer.conv.dtype == dtype
            state = mixer.over(plan.states(layer.attention).blocks)
            self._parts.append(state)
            return {"state": ctypes.addressof(state)}
        group, attention = local
        part = plan.parts[group]
        assert isinstance(part, CpuPlan)
        backend = part.backend
        num_heads, kv = backend.shape.num_heads, backend.kv_shape
        num_mixed = num_heads * kv.head_dim
        assert layer.output.num_inputs == num_mixed
        num_qkv = num_mixed + 2 * kv.num_kv_heads * kv.head_dim
        assert layer.num_projected == num_qkv + layer.is_gated * num_mixed
        rotated = backend.rotated(attention)
        self._parts.append(rotated)
        sinks = backend.sinks_address(attention)
        return {"rotated": ctypes.addressof(rotated), "sinks": sinks, "index": attention.index}

    def are_for(self, plan: AttentionPlan) -> bool:
        """Whether this plan's backend has planned the last step too."""
        return self._backend() is _backend_of(plan)


def _backend_of(plan: AttentionPlan) -> AttentionBackend:
    assert isinstance(plan, CpuPlan | GroupsPlan)
    return plan.backend
