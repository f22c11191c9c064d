"""Measure what a rank on CUDA needs of its device in addition to KV, by running it with little KV.

`workers.model.rank_memory` estimates the same without a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
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
from workers.model.rank_memory import CUDA_CONTEXT_BYTES, GRAPH_LAYER_BYTES, GROUP_BYTES
from workers.rank.device_accounts import DeviceAccounts

# No context, with all kernels and groups, takes as much: such a figure is that of another process.
_MOST_OTHER_BYTES = 4 << 30

# Sampling parameters that use all that a draw can use.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=1)


class MemoryLimits(NamedTuple):
    """Bytes of a device: all, and the most that was seen not to be other processes'. Ranks that stay within
    their shares leave each other more than these, whatever they do at the same time."""

    total_bytes: int
    most_available_bytes: int


class MemoryProfile(NamedTuple):
    """Bytes of device memory that a rank takes in addition to KV: its weights, the most that a step takes on
    top of them (with what is kept by slot), its graphs, what is not torch's (the CUDA context, kernels,
    buffers of NCCL), and buffers that are made later, of transfers and of what is streamed from host
    memory."""

    weight_bytes: int
    step_bytes: int
    graph_bytes: int
    other_bytes: int
    buffer_bytes: int

    def kv_bytes(self, share: float, memory: MemoryLimits) -> int:
        """Return the bytes that remain for KV of `share` of a device, and of what others leave of it."""
        return max(0, min(round(share * memory.total_bytes), memory.most_available_bytes) - sum(self))


def largest_steps(
    num_rows: int, max_sequences: int, max_context_tokens: int, block_tokens: int
) -> Iterator[StepPlan]:
    """Yield plans whose steps need the most memory, of up to `num_rows` tokens and `max_sequences` sequences,
    between one that starts their slots and one that frees them: a chunk of one prompt all of which is read, a
    chunk of every prompt, a decode of every sequence at the end of its context, and a chunk along with those
    of the others. All read the same blocks, the first ones, again and again."""
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
    """Reads a rank's memory on its device while it goes through its start: its weights are loaded when the
    meter is made, then `step_done` after the largest steps, `graph_done` after each of two graphs or more,
    and `profile` when all but the weights is released.

    All of it is of this process alone, so that neighbors on the device, which start, stop and grow then,
    change nothing (`workers.rank.device_accounts`).
    """

    def __init__(self, accounts: DeviceAccounts, num_layers: int, *, is_in_group: bool = False) -> None:
        """`is_in_group`: the rank has groups with others."""
        self._accounts = accounts
        self._num_layers = num_layers
        self._is_in_group = is_in_group
        accounts.release()
        self._weight_bytes = accounts.reserved_bytes
        accounts.begin_peak()
        self._step_bytes = 0
        self._reserved_after: list[int] = []
        self._most_left_bytes = 0
        self._look()

    def step_done(self, kv_bytes: int) -> None:
        """Note the most that was reserved so far, with KV of this size included."""
        self._step_bytes = self._accounts.peak_reserved_bytes - self._weight_bytes - kv_bytes
        self._accounts.release()  # a recording does, and what it released would count against what it took
        self._reserved_after = [self._accounts.reserved_bytes]
        self._look()

    def graph_done(self) -> None:
        """Note what the graph that was recorded last took."""
        self._reserved_after.append(self._accounts.reserved_bytes)
        self._look()

    def profile(self, num_graphs: int, buffer_bytes: int) -> MemoryProfile:
        """Return the profile of a rank that will record `num_graphs` in all and make buffers of this
        size."""
        # Workspaces of products lie in the memory of graphs that are gone.
        self._accounts.release(with_workspaces=True)
        self._look()
        graphs = of_all_graphs(self._reserved_after, num_graphs)
        graphs += num_graphs * self._num_layers * GRAPH_LAYER_BYTES
        return MemoryProfile(self._weight_bytes, self._step_bytes, graphs, self._other_bytes(), buffer_bytes)

    def limits(self, profile: MemoryProfile) -> MemoryLimits:
        """Return the limits of the device for the rank with this profile."""
        total_bytes = self._accounts.availability().total_bytes
        return MemoryLimits(total_bytes, min(total_bytes, self._most_left_bytes + profile.other_bytes))

    def _other_bytes(self) -> int:
        """Return the bytes that the process has of the device apart from torch's memory, by the driver's
        account if that says anything sensible, else an allowance."""
        allowance = CUDA_CONTEXT_BYTES + (GROUP_BYTES if self._is_in_group else 0)
        process_bytes = self._accounts.process_bytes()
        if process_bytes is None:
            return allowance
        others = process_bytes - self._accounts.reserved_bytes
        # Elsewhere the number of this process may be that of another one.
        return others if 0 < others < _MOST_OTHER_BYTES else allowance

    def _look(self) -> None:
        """Note the memory that torch has or could have of the device now; memory that is not torch's is not
        in it."""
        left_bytes = self._accounts.availability().free_bytes + self._accounts.reserved_bytes
        self._most_left_bytes = max(self._most_left_bytes, left_bytes)


def of_all_graphs(reserved_after: Sequence[int], num_graphs: int) -> int:
    """Return what `num_graphs` take of the allocator's memory, from what was reserved before the first one
    was recorded, and after each of some. They share their tensors' memory, which is that of the first; the
    others take what the last one took."""
    taken = [max(0, after - before) for before, after in itertools.pairwise(reserved_after)]
    return sum(taken) + (num_graphs - len(taken)) * taken[-1] if taken else 0
