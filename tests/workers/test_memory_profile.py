"""The arithmetic of a rank's memory on CUDA, beside neighbors too, and the steps that are run to measure it,
here on a CPU. What CUDA reports is tested in tests/gpu."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runner_parts import ON_CPU

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import ManualClock
from workers.model.rank_memory import CUDA_CONTEXT_BYTES, GRAPH_LAYER_BYTES, GROUP_BYTES
from workers.rank.device_accounts import Availability, nvml_process_bytes
from workers.rank.device_queue import CpuQueue, DeviceQueue
from workers.rank.memory_profile import (
    MemoryLimits,
    MemoryMeter,
    MemoryProfile,
    largest_steps,
    of_all_graphs,
    trial_blocks,
)
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

GIB = 1 << 30
BLOCK = 16


def test_kv_gets_what_the_rest_leaves() -> None:
    profile = MemoryProfile(
        weight_bytes=10 * GIB, step_bytes=3 * GIB, graph_bytes=GIB, other_bytes=2 * GIB, buffer_bytes=5 * GIB
    )
    alone = MemoryLimits(80 * GIB, 80 * GIB)
    assert profile.kv_bytes(0.9, alone) == round(0.9 * 80 * GIB) - 21 * GIB
    shared = MemoryLimits(80 * GIB, most_available_bytes=22 * GIB)
    assert profile.kv_bytes(0.9, shared) == GIB, "another process holds most of the device"
    assert profile.kv_bytes(0.1, alone) == 0


def test_graphs_after_the_first_take_what_the_last_measured_one_took() -> None:
    assert of_all_graphs([], 0) == 0
    assert of_all_graphs([100], 0) == 0
    assert of_all_graphs([60, 100], 1) == 40
    assert of_all_graphs([57, 97, 106], 10) == 40 + 9 * 9
    assert of_all_graphs([60, 100, 98], 10) == 40


class Card:
    """A device whose free memory is what the `others` of a process leave."""

    total_bytes = 80 * GIB

    def __init__(self) -> None:
        self.ranks: list[Accounts] = []
        self.strangers: Callable[[], int] = lambda: 0


class Accounts:
    """What one rank's process holds of the card. `driver` is what the driver says of the process."""

    def __init__(self, card: Card, driver: Callable[[Accounts], int | None] = lambda _: None) -> None:
        self._card, self._driver = card, driver
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.unused_bytes = 0
        self.context_bytes = 500 << 20
        card.ranks.append(self)

    @property
    def held_bytes(self) -> int:
        return self.context_bytes + self.reserved_bytes

    def reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def begin_peak(self) -> None:
        self.peak_reserved_bytes = self.reserved_bytes

    def process_bytes(self) -> int | None:
        return self._driver(self)

    def availability(self) -> Availability:
        used = sum(rank.held_bytes for rank in self._card.ranks) + self._card.strangers()
        return Availability(max(0, self._card.total_bytes - used), self._card.total_bytes)

    def release(self, *, with_workspaces: bool = False) -> None:
        self.reserved_bytes -= self.unused_bytes
        self.unused_bytes = 0


NUM_GRAPHS, NUM_LAYERS = 35, 32


def start(accounts: Accounts, share: float) -> Iterator[int]:
    """Go through the start of a rank of an 8B shape, yielding 0 where others may act, and the KV at the end,
    which is then reserved."""
    accounts.reserve(5 * GIB)
    yield 0
    accounts.reserve(11 * GIB)
    accounts.unused_bytes = 100 << 20
    meter = MemoryMeter(accounts, NUM_LAYERS)
    yield 0
    accounts.reserve(GIB // 4)  # KV of the trial
    accounts.reserve(3 * GIB)
    accounts.unused_bytes = 3 * GIB
    yield 0
    meter.step_done(GIB // 4)
    for taken in (20 << 20, 2 << 20):
        yield 0
        accounts.reserve(taken)
        meter.graph_done()
    accounts.unused_bytes = GIB // 4 + (22 << 20)
    yield 0
    profile = meter.profile(NUM_GRAPHS, 256 << 20)
    yield 0
    kv_bytes = profile.kv_bytes(share, meter.limits(profile))
    accounts.reserve(kv_bytes)
    yield kv_bytes


def kv_alone(share: float) -> int:
    return max(start(Accounts(Card()), share))


def test_a_rank_alone_gets_what_its_share_leaves() -> None:
    graphs = (22 << 20) + 33 * (2 << 20) + NUM_GRAPHS * NUM_LAYERS * GRAPH_LAYER_BYTES
    taken = 16 * GIB - (100 << 20) + 3 * GIB + (100 << 20) + graphs + CUDA_CONTEXT_BYTES + (256 << 20)
    assert kv_alone(0.45) == pytest.approx(0.45 * 80 * GIB - taken, rel=0.01)


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 7))
def test_two_ranks_that_start_at_once_get_what_each_gets_alone(order: list[bool], num_ahead: int) -> None:
    card = Card()
    starts = [start(Accounts(card), 0.45) for _ in range(2)]
    kv_bytes = [0, 0]
    turns = [0] * num_ahead + [int(is_second) for is_second in order] + [0, 1] * 10
    for turn in turns:
        kv_bytes[turn] = max(kv_bytes[turn], next(starts[turn], 0))
    assert kv_bytes == [pytest.approx(kv_alone(0.45), rel=0.03)] * 2


@given(st.lists(st.integers(0, 40 * GIB), min_size=1))
def test_a_neighbor_that_starts_stops_and_grows_changes_nothing(used: list[int]) -> None:
    """Within what the rank's share leaves: each look at the card finds gigabytes more or less free."""
    card = Card()
    looks = itertools.cycle(used)
    card.strangers = lambda: next(looks)
    assert max(start(Accounts(card), 0.45)) == pytest.approx(kv_alone(0.45), rel=0.03)


def test_what_a_neighbor_keeps_is_not_given_to_kv() -> None:
    card = Card()
    card.strangers = lambda: 50 * GIB
    found = max(start(Accounts(card), 0.9))
    assert 0 < found < 30 * GIB - 19 * GIB
    assert card.ranks[0].held_bytes <= 30 * GIB


def test_the_drivers_account_of_the_process_is_taken_where_it_makes_sense() -> None:
    def others(driver: Callable[[Accounts], int | None], *, is_in_group: bool = False) -> int:
        meter = MemoryMeter(Accounts(Card(), driver), NUM_LAYERS, is_in_group=is_in_group)
        return meter.profile(0, 0).other_bytes

    assert others(lambda own: own.held_bytes) == 500 << 20
    for nonsense in (lambda _: None, lambda _: 0, lambda _: 60 * GIB):
        assert others(nonsense) == CUDA_CONTEXT_BYTES
    assert others(lambda _: None, is_in_group=True) == CUDA_CONTEXT_BYTES + GROUP_BYTES


class FakeNvml:
    """The driver's library, which knows these processes of one device."""

    def __init__(self, processes: dict[int, int]) -> None:
        self._processes = processes

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:
        for place, (pid, used_bytes) in enumerate(self._processes.items()):
            found[place].pid, found[place].used_bytes = pid, used_bytes
        count._obj.value = len(self._processes)
        return 0


def test_the_driver_is_asked_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(processes: dict[int, int]) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeNvml(processes))

    stranger = os.getpid() + 1
    load({stranger: 5, os.getpid(): 7 * GIB})
    assert nvml_process_bytes("GPU-1") == 7 * GIB
    assert nvml_process_bytes("GPU-2") is None
    load({stranger: 5})
    assert nvml_process_bytes("GPU-1") is None, "another name space of processes"
    load({os.getpid(): (1 << 64) - 1})
    assert nvml_process_bytes("GPU-1") is None, "not available"
    monkeypatch.undo()
    assert nvml_process_bytes("GPU-1", "libno-such-library.so") is None


@pytest.mark.parametrize(("num_rows", "max_sequences", "context"), [(64, 4, 48), (10, 16, 100), (33, 1, 20)])
def test_the_largest_steps_fill_every_limit(num_rows: int, max_sequences: int, context: int) -> None:
    started, *steps, freed = largest_steps(num_rows, max_sequences, context, BLOCK)
    assert freed.free_slots == tuple(started.started_slots)
    assert all(plan.num_tokens <= num_rows for plan in steps)
    assert all(entry.num_tokens <= context for plan in steps for entry in plan.entries)
    assert max(plan.num_tokens for plan in steps) >= min(num_rows, context)
    most = min(max_sequences, num_rows)
    assert max(len(plan.sample_slots) for plan in steps) == most
    *_, decodes, mixed = steps
    assert {entry.start + entry.num_tokens for entry in decodes.entries} == {context}
    chunk, *beside = mixed.entries
    assert beside == list(decodes.entries[1:])
    assert len(beside) == most - 1
    assert mixed.num_tokens == num_rows or chunk.num_tokens == context
    assert trial_blocks(num_rows, context, BLOCK) * BLOCK >= min(num_rows, context)


@pytest.mark.parametrize("queue", [None, CpuQueue()], ids=["host", "device"])
def test_they_run_over_the_fewest_blocks(tmp_path: Path, queue: DeviceQueue | None) -> None:
    write_random_checkpoint(tmp_path, "llama", seed=3)
    runner = ModelRunner(
        CheckpointFolder(tmp_path),
        ON_CPU._replace(queue=queue),
        RankCapacity(BLOCK, trial_blocks(40, 2048, BLOCK) * BLOCK, 5),
        ManualClock(0.0),
    )
    started, *largest, freed = largest_steps(40, 5, 2048, BLOCK)
    runner.kv.fill_(1.0)
    steps = runner._make_steps(runner.attention, 2048)  # with tables for the whole context
    steps.collect(steps.launch(started))
    for plan in largest:
        steps.rehearse(plan)
    steps.collect(steps.launch(freed))
    assert not runner.kv[:, :, :, :, 0].any(), "the layers have run, over zeros"
    assert not steps.batch.is_started.any()
    runner.close()
