"""Measure what a rank on CUDA needs of its device beside KV, by running it with little KV.

`workers.model.rank_memory` estimates the same without a device. Not yet validated on CUDA."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from workers.messages.rank_channel import (
    BatchEntry,
    PromptTargets,
    SlotSample,
    SlotStart,
    StepPlan,
    TableChange,
)
from workers.messages.sampling import SamplingParams
from workers.model.rank_memory import CUDA_CONTEXT_BYTES
from workers.stats_record import DeviceMemory

# Uses all that a draw can use.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=1)


class MemoryProfile(NamedTuple):
    """Bytes of device memory that a rank takes beside KV: its weights, the most that a step takes on top of
    them (with what is kept by slot), its graphs, what is not torch's (the CUDA context, kernels, buffers of
    NCCL), and buffers that are made later, of transfers and of what is streamed from host memory."""

    weight_bytes: int
    step_bytes: int
    graph_bytes: int
    other_bytes: int
    buffer_bytes: int

    def kv_bytes(self, share: float, memory: DeviceMemory) -> int:
        """Return what is left for KV of `share` of a device, with its `memory` as it is when the rank holds
        nothing but its weights."""
        free_bytes = memory.total_bytes - memory.used_bytes
        left = round(share * memory.total_bytes) - sum(self)
        return max(0, min(left, free_bytes - self.step_bytes - self.graph_bytes - self.buffer_bytes))


def largest_steps(
    num_rows: int, max_sequences: int, max_context_tokens: int, block_tokens: int
) -> Iterator[StepPlan]:
    """Yield plans whose steps need the most memory, of up to `num_rows` tokens and `max_sequences` sequences,
    between one that starts their slots and one that frees them: a chunk of one prompt all of which is read, a
    chunk of every prompt, a decode of every sequence at the end of its context, and a chunk beside those of
    the others. All read the same blocks, the first ones, again and again."""
    longest = min(num_rows, max_context_tokens)
    each = min(max(num_rows // max_sequences, 1), longest)
    slots = range(min(max_sequences, num_rows))
    prompt = np.zeros(1, "<u4").tobytes()
    num_blocks = trial_blocks(num_rows, max_context_tokens, block_tokens)
    table = (np.arange(-(-max_context_tokens // block_tokens)) % num_blocks).astype("<u4").tobytes()
    decodes = tuple(_chunk(slot, 1, max_context_tokens - 1) for slot in slots)
    samples = tuple(SlotSample(slot, 0, 0) for slot in slots)
    yield StepPlan(
        0,
        starts=(SlotStart(_SAMPLING, samples, prompt),),
        tables=tuple(TableChange(slot, 0, table) for slot in slots),
    )
    targets = PromptTargets(0, bytes(4 * longest), 1)
    yield StepPlan(0, entries=(replace(_chunk(0, longest), targets=targets),))
    yield StepPlan(0, entries=tuple(_chunk(slot, each) for slot in slots))
    yield StepPlan(0, entries=decodes)
    beside = min(num_rows - len(decodes) + 1, longest)
    yield StepPlan(0, entries=(_chunk(0, beside), *decodes[1:]))
    yield StepPlan(0, free_slots=tuple(slots))


def trial_blocks(num_rows: int, max_context_tokens: int, block_tokens: int) -> int:
    """Return how many blocks `largest_steps` use."""
    return -(-min(num_rows, max_context_tokens) // block_tokens)


def _chunk(slot: int, num_tokens: int, start: int = 0) -> BatchEntry:
    return BatchEntry(slot, start, num_tokens, bytes(4 * num_tokens), (slot,))


class MemoryMeter:
    """Reads a CUDA device's memory while a rank goes through its start: its weights are loaded when the meter
    is made, then `step_done` after the largest steps, `graph_done` after each of two graphs or more, and
    `profile` when all but the weights is released."""

    def __init__(self, device: torch.device, free_at_start: int) -> None:
        """`free_at_start` is what was free before the rank's groups were formed."""
        self._device = device
        self._free_at_start = free_at_start
        torch.cuda.empty_cache()
        self._weight_bytes = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._step_bytes = 0
        self._free_after: list[int] = []

    def step_done(self, kv_bytes: int) -> None:
        """Note the most that was reserved so far, beside KV of this size."""
        self._step_bytes = torch.cuda.max_memory_reserved(self._device) - self._weight_bytes - kv_bytes
        torch.cuda.empty_cache()  # a recording does, and what it released would count against what it took
        self._free_after = [self.free_bytes]

    def graph_done(self) -> None:
        """Note what the graph that was recorded last took."""
        self._free_after.append(self.free_bytes)

    def profile(self, num_graphs: int, buffer_bytes: int) -> MemoryProfile:
        """Return the profile of a rank that will record `num_graphs` in all and make buffers of this
        size."""
        gc.collect()  # what was released may be part of a cycle
        torch._C._cuda_clearCublasWorkspaces()  # they lie in the memory of graphs that are gone
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved(self._device)
        others = max(0, self._free_at_start - self.free_bytes - held)
        graphs = of_all_graphs(self._free_after, num_graphs)
        others += CUDA_CONTEXT_BYTES
        return MemoryProfile(self._weight_bytes, self._step_bytes, graphs, others, buffer_bytes)

    @property
    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])


def of_all_graphs(free_after: Sequence[int], num_graphs: int) -> int:
    """Return what `num_graphs` take, from the memory that was free before the first one was recorded, and
    after each of some. They share their tensors' memory, which is that of the first; the others take what the
    last one took."""
    taken = [max(0, before - after) for before, after in itertools.pairwise(free_after)]
    return sum(taken) + (num_graphs - len(taken)) * taken[-1] if taken else 0
