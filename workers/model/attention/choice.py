"""Choose the attention backend of a rank: the fastest for the model's shape, as measured at start."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvtransfer.common.clock import Clock
from workers.errors import WorkerError
from workers.model import cuda, native
from workers.model.attention.cpu_backend import CpuAttention
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionShape,
    LayerAttention,
    SequenceSpan,
    StepInput,
    kv_shape,
)
from workers.model.attention.kinds_backend import backend_of_kinds
from workers.model.attention.torch_backend import TorchAttention

_log = logging.getLogger("tandem.rank")

# The measured steps, one of each kind: sequences that decode after `_DECODE_CONTEXT` tokens, and a chunk of a
# prompt.
_NUM_DECODES, _DECODE_CONTEXT, _CHUNK_TOKENS = 4, 1024, 128
# The candidates run in turn, so that other work of the machine slows all alike; the best run of each counts.
_NUM_ROUNDS = 4
# A later candidate must be faster by this factor, so that equal machines choose alike.
_CLEARLY = 1.25


class AttentionTimes(NamedTuple):
    """Seconds of one layer of the measured steps."""

    decode_s: float
    chunk_s: float


def choose_attention(
    shape: AttentionShape,
    kv: Tensor,
    clock: Clock | None = None,
    *,
    is_staged: bool = False,
    is_deterministic: bool = False,
) -> AttentionBackend:
    """Return the backend for a rank's KV, which holds nothing yet and is overwritten: with a clock the
    fastest, else the first of those that serve it. `is_staged`: blocks in host memory shall be staged.
    `is_deterministic`: only those whose results for a sequence do not depend on the others of a step.

    Raises WorkerError if there is none."""
    choose = functools.partial(_choose, clock=clock, is_staged=is_staged, is_deterministic=is_deterministic)
    return backend_of_kinds(shape, kv, choose)


def _choose(
    shape: AttentionShape, kv: Tensor, clock: Clock | None, *, is_staged: bool, is_deterministic: bool
) -> AttentionBackend:
    """Return the backend for layers with one kind of heads."""
    candidates = [
        backend
        for backend in candidate_backends(shape, kv, is_deterministic=is_deterministic)
        if (backend.can_stage or not is_staged) and (backend.is_deterministic or not is_deterministic)
    ]
    if not candidates:
        raise WorkerError(
            "deterministic attention needs CUDA with Triton, or a CPU with AVX2, a C++ compiler, "
            "float32 or bfloat16, a head size that is a multiple of 16, and offload_mode not 'stream'"
        )
    if len(candidates) == 1 or clock is None:
        return candidates[0]
    times = _measure(candidates, clock)
    chosen, best = candidates[0], times[0]
    for backend, measured in zip(candidates[1:], times[1:], strict=True):
        if measured.decode_s * measured.chunk_s * _CLEARLY**2 < best.decode_s * best.chunk_s:
            chosen, best = backend, measured
    figures = [f"{it.name} {_figures(measured)}" for it, measured in zip(candidates, times, strict=True)]
    kv[: _num_blocks(kv)].zero_()
    _log.info("attention backend: %s; a layer takes: %s", chosen.name, ", ".join(figures))
    return chosen


def candidate_backends(
    shape: AttentionShape, kv: Tensor, *, is_deterministic: bool = False
) -> list[AttentionBackend]:
    """Return the backends that serve this KV, the one that is expected to be fastest first. With
    `is_deterministic`, one that can be deterministic at a price is."""
    backends: list[AttentionBackend] = [TorchAttention(shape, kv)]
    if cuda.serves(kv.device):
        # Only here: where it serves nothing there may be no Triton.
        from workers.model.attention.triton_latents import make_triton

        backends.insert(0, make_triton(shape, kv, is_deterministic=is_deterministic))
    if CpuAttention.serves(shape, kv):
        kernels = native.load()
        assert kernels is not None
        backends.insert(0, CpuAttention(shape, kv, kernels, is_deterministic=is_deterministic))
    return backends


def _figures(times: AttentionTimes) -> str:
    return f"decode {times.decode_s * 1e3:.2f} ms, chunk {times.chunk_s * 1e3:.2f} ms"


def _num_blocks(kv: Tensor) -> int:
    """Return how many blocks the measurement uses."""
    return min(kv.shape[0], -(-max(_DECODE_CONTEXT, _CHUNK_TOKENS) // kv_shape(kv).block_tokens))


@torch.inference_mode()
def _measure(backends: list[AttentionBackend], clock: Clock) -> list[AttentionTimes]:
    """Measure a layer's attention with each backend."""
    steps = [_measured_steps(backend) for backend in backends]
    rounds = [[[_seconds(run, clock) for run in runs] for runs in steps] for _ in range(_NUM_ROUNDS)]
    return [AttentionTimes(*seconds) for seconds in np.array(rounds).min(0)]


def _measured_steps(backend: AttentionBackend) -> list[Callable[[], None]]:
    """Return a decoding step and a chunk. The sequences that decode share their blocks: fewer are needed."""
    block_tokens = kv_shape(backend.kv, backend.shape.num_scales).block_tokens
    blocks = range(_num_blocks(backend.kv))
    num_tokens = min(len(blocks) * block_tokens, _DECODE_CONTEXT)
    decodes = [SequenceSpan(num_tokens - 1, 1, blocks)] * _NUM_DECODES
    chunk = SequenceSpan(0, min(num_tokens, _CHUNK_TOKENS), blocks)
    layer = LayerAttention(0, backend.shape.windows[0])
    if backend.shape.has_sinks:
        sinks = torch.zeros(backend.shape.num_heads, dtype=torch.float32, device=backend.kv.device)
        layer = dataclasses.replace(layer, sinks=sinks)

    def step(spans: list[SequenceSpan]) -> Callable[[], None]:
        made = StepInput.of(spans, block_tokens)
        num_rows = sum(span.num_tokens for span in spans)
        num_heads = backend.shape.num_heads + 2 * kv_shape(backend.kv, backend.shape.num_scales).num_kv_heads
        qkv = torch.ones(num_rows, num_heads * kv_shape(backend.kv, backend.shape.num_scales).head_dim)
        qkv = qkv.to(backend.kv.device, backend.dtype)

        def run() -> None:
            plan = backend.plan(made)
            # Of latents, the backend that is measured neither rotates nor writes.
            if backend.shape.rotations:
                plan.run(layer, qkv)
            else:
                plan.attend(layer, qkv[:, : -2 * kv_shape(backend.kv, backend.shape.num_scales).head_dim])
            if backend.kv.is_cuda:
                torch.cuda.synchronize(backend.kv.device)

        return run

    return [step(decodes), step([chunk])]


def _seconds(work: Callable[[], None], clock: Clock) -> float:
    started_at = clock.now()
    work()
    return clock.now() - started_at
