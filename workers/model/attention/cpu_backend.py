"""Attention by compiled kernels on a CPU: paged blocks are read in place, on the device and in host memory.

The computation for a token, and its order, depend on its position, its layer's window and whether it
is decoded alone: its result does not depend on the other sequences of a step or the number of threads, and
where that is asked for, not on the chunks either in which its sequence was computed
(`workers/model/native/attention.h`)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model import native
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    LayerAttention,
    PartialResults,
    Rotation,
    StepInput,
    kv_shape,
)
from workers.model.attention.torch_backend import TorchAttention
from workers.model.sizes import ATTENTION_PIECE_FLOPS

_HEAD_DIM_MULTIPLE = 16
# `MOST_DIM` of `attention.h`.
_MOST_HEAD_DIM = 1024
_TASK = np.dtype([("cost", np.int64), ("place", np.int32, 4)])
_NO_ID = (1 << 63) - 1
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class AttentionStep(ctypes.Structure):
    """`AttentionStep` of `attention.h`."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("tables", "slots", "starts", "lengths", "tasks", "kv", "host")
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_sequences", "table_stride", "num_tasks", "num_split", "window", "block_stride",
                "layer_stride", "kind_stride", "head_stride", "first_host", "num_heads", "num_kv_heads",
                "head_dim", "block_tokens", "is_invariant", "kv_elements", "tail_dim",
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )  # fmt: skip


class CpuAttention(AttentionBackend):
    """Attention by the kernels of one instruction set. Blocks in host memory are read in place.

    With `is_deterministic` a token that is decoded has, bit for bit, the result that it has in a chunk; else
    its rows may be computed by a faster way of their own."""

    can_stage = False

    def __init__(
        self,
        shape: AttentionShape,
        kv: Tensor,
        kernels: native.Kernels,
        *,
        is_deterministic: bool = False,
    ) -> None:
        assert self.serves(shape, kv)
        super().__init__(shape, kv)
        self.is_deterministic = is_deterministic
        self.name = f"cpu {kernels.isa.value}"
        self.kernels = kernels
        self.task_rows: int = kernels.library.attention_task_rows()
        # By the identity of the layer, which is kept with it: several may attend to one layer of the KV.
        self._id_to_layer: dict[int, tuple[LayerAttention, native.RotatedLayer]] = {}
        self.kv_shape = kv_shape(kv, shape.num_scales)
        self.attend = getattr(kernels.library, f"attend_{_DTYPES[self.dtype]}")
        self.attend.argtypes = [
            ctypes.POINTER(AttentionStep), ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p,
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
        ]  # fmt: skip

    @staticmethod
    def serves(shape: AttentionShape, kv: Tensor) -> bool:
        """Whether the kernels compute over this KV."""
        _, _, block_tokens, head_dim = kv_shape(kv, shape.num_scales)
        fits = head_dim % _HEAD_DIM_MULTIPLE == 0 and head_dim <= _MOST_HEAD_DIM and block_tokens % 16 == 0
        return fits and native.serves(kv.device, shape.dtype or kv.dtype)

    def rotated(self, layer: LayerAttention) -> native.RotatedLayer:
        """Return the kernel's arguments of a layer."""
        _, made = self._id_to_layer.get(id(layer), (None, None))
        if made is None:
            norms, is_written = (layer.q_norm, layer.k_norm), layer.has_own_kv
            made = native.RotatedLayer.of(
                self.kv, layer.index, self.shape.num_heads, *norms, is_written=is_written, dtype=self.dtype
            )
            self._id_to_layer[id(layer)] = (layer, made)
        return made

    def sinks_address(self, layer: LayerAttention) -> int | None:
        """Return where the kernels read the sinks of a layer, which must outlive their use; None: it has
        none."""
        sinks = layer.sinks
        if sinks is None:
            return None
        assert sinks.dtype == torch.float32
        assert sinks.shape == (self.shape.num_heads,)
        assert sinks.is_contiguous()
        return sinks.data_ptr()

    def plan(self, step: StepInput) -> CpuPlan:
        return CpuPlan(self, step)

    def over(self, shape: AttentionShape, kv: Tensor) -> AttentionBackend:
        if not self.serves(shape, kv):
            return TorchAttention(shape, kv)
        return CpuAttention(shape, kv, self.kernels, is_deterministic=self.is_deterministic)


class PlannedTasks(NamedTuple):
    """The kernels' arguments of the layers with one window: a step, and how many of its `tasks` are computed
    between two marks of progress."""

    step: AttentionStep
    piece_tasks: int
    tasks: np.ndarray


class CpuPlan(AttentionPlan):
    """The attention of one step by kernels."""

    def __init__(self, backend: CpuAttention, step: StepInput) -> None:
        super().__init__(step)
        assert step.host is None or not step.host.is_staged
        self.backend = backend
        self._step = step  # keeps the arrays
        positions = step.positions()
        self.num_tokens = len(positions)
        self._blocks = torch.from_numpy(step.token_blocks(positions))
        self._offsets = torch.from_numpy((positions % step.block_tokens).astype(np.int32))
        # Cosines and sines of each rotation, which the kernels read.
        self._tables: list[tuple[Tensor, Tensor]] = []
        self.rotations = [self._rotated_tokens(positions, it) for it in backend.shape.rotations]
        self.window_to_tasks = {
            window: self._tasks(window) for window in dict.fromkeys(backend.shape.windows)
        }

    def run(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        backend = self.backend
        backend.kernels.rotate_and_write(backend.rotated(layer), self.rotations[layer.rotation], qkv)
        return self.attend(layer, qkv)

    def attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        """Attend as `AttentionPlan.attend` describes; rows of `queries` may have further columns."""
        num_heads, head_dim = self.backend.shape.num_heads, self.backend.kv_shape.head_dim
        out = torch.empty((self.num_tokens, num_heads * head_dim), dtype=queries.dtype)
        self._attend(layer, queries, out, None)
        return out

    def attend_parts(self, layer: LayerAttention, queries: Tensor) -> PartialResults:
        num_heads, head_dim = self.backend.shape.num_heads, self.backend.kv_shape.head_dim
        mixed = torch.empty((self.num_tokens, num_heads, head_dim), dtype=torch.float32)
        log_sums = torch.empty((self.num_tokens, num_heads), dtype=torch.float32)
        self._attend(layer, queries, mixed, log_sums)
        return PartialResults(mixed, log_sums)

    def _attend(self, layer: LayerAttention, queries: Tensor, out: Tensor, log_sums: Tensor | None) -> None:
        assert queries.stride(1) == 1
        backend = self.backend
        tasks = self.window_to_tasks[layer.window]
        inputs = (queries.data_ptr(), queries.stride(0), backend.sinks_address(layer))
        written = out.data_ptr(), None if log_sums is None else log_sums.data_ptr()
        num_tasks = tasks.step.num_tasks
        for begin in range(0, num_tasks, tasks.piece_tasks):
            end = min(begin + tasks.piece_tasks, num_tasks)
            backend.attend(tasks.step, layer.index, *inputs, *written, begin, end)
            if end < num_tasks:
                self.marks.mark()

    def _rotated_tokens(self, positions: NDArray[np.int64], rotation: Rotation) -> native.RotatedTokens:
        dtype = self.backend.dtype
        # Cosines and sines are rounded as transformers rounds them.
        cos, sin = (table.to(dtype).float() for table in rotation.table(torch.from_numpy(positions)))
        self._tables.append((cos, sin))
        return native.RotatedTokens.of(cos, sin, self._blocks, self._offsets)

    def _tasks(self, window: int) -> PlannedTasks:
        """Plan layers with this window."""
        backend, step = self.backend, self._step
        shape, num_heads = backend.kv_shape, backend.shape.num_heads
        kv, host = backend.kv, None
        if step.host is not None:
            host = step.host.in_place()
        rows = max(1, backend.task_rows // (num_heads // shape.num_kv_heads))
        tasks = np.empty(int(np.sum(-(-step.lengths // rows))), dtype=_TASK)
        for array in (step.tables, step.slots, step.starts, step.lengths):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        made = AttentionStep(
            tables=step.tables.ctypes.data, slots=step.slots.ctypes.data, starts=step.starts.ctypes.data,
            lengths=step.lengths.ctypes.data, tasks=tasks.ctypes.data, kv=kv.data_ptr(),
            host=None if host is None else host.data_ptr(), num_sequences=len(step.slots),
            table_stride=step.tables.shape[1], num_tasks=0, num_split=0, window=window,
            block_stride=kv.stride(0), layer_stride=kv.stride(1), kind_stride=kv.stride(2),
            head_stride=kv.stride(3),
            first_host=_NO_ID if step.host is None else step.host.first_id, num_heads=num_heads,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, block_tokens=shape.block_tokens,
            is_invariant=backend.is_deterministic, kv_elements=native.KV_ELEMENTS.get(kv.dtype, 0),
            tail_dim=sum(backend.shape.parts(shape.head_dim)[1:]),
            scale=backend.shape.scale(shape.head_dim), softcap=backend.shape.softcap,
        )  # fmt: skip
        backend.kernels.library.plan_attention(ctypes.byref(made))
        largest = 4.0 * num_heads * shape.head_dim * float(tasks["cost"][0])
        return PlannedTasks(made, max(1, int(ATTENTION_PIECE_FLOPS / largest)), tasks)
