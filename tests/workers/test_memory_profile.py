"""The arithmetic of a rank's memory on CUDA, and the steps that are run to measure it, here on a CPU. What
CUDA reports is tested in tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import ManualClock
from workers.rank.device_queue import CpuQueue, DeviceQueue
from workers.rank.memory_profile import MemoryProfile, largest_steps, of_all_graphs, trial_blocks
from workers.rank.model_runner import ModelRunner
from workers.stats_record import DeviceMemory

GIB = 1 << 30
BLOCK = 16


def test_kv_gets_what_the_rest_leaves() -> None:
    profile = MemoryProfile(
        weight_bytes=10 * GIB, step_bytes=3 * GIB, graph_bytes=GIB, other_bytes=2 * GIB, buffer_bytes=5 * GIB
    )
    alone = DeviceMemory(used_bytes=12 * GIB, total_bytes=80 * GIB)
    assert profile.kv_bytes(0.9, alone) == round(0.9 * 80 * GIB) - 21 * GIB
    shared = DeviceMemory(used_bytes=70 * GIB, total_bytes=80 * GIB)
    assert profile.kv_bytes(0.9, shared) == GIB, "another process holds most of the device"
    assert profile.kv_bytes(0.1, alone) == 0


def test_graphs_after_the_first_take_what_the_last_measured_one_took() -> None:
    assert of_all_graphs([], 0) == 0
    assert of_all_graphs([100], 0) == 0
    assert of_all_graphs([100, 60], 1) == 40
    assert of_all_graphs([100, 60, 57], 10) == 40 + 3 * 9
    assert of_all_graphs([100, 60, 62], 10) == 40, "another process released memory meanwhile"


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
        model_dir=tmp_path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_tokens=BLOCK,
        num_kv_tokens=trial_blocks(40, 2048, BLOCK) * BLOCK,
        num_threads=1,
        max_sequences=5,
        clock=ManualClock(0.0),
        queue=queue,
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
