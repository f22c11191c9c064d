"""A decoding step takes as many calls of Python for many sequences as for few."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
from local_engine import BLOCK, draw, packed, started
from runner_parts import ON_CPU

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import ManualClock
from workers.messages.rank_channel import BatchEntry, StepPlan, TableChange
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

LENGTH = 2 * BLOCK
MOST = 64


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "qwen3", seed=3)
    return ModelRunner(CheckpointFolder(path), ON_CPU, RankCapacity(BLOCK, 8 * BLOCK, MOST), ManualClock(5.0))


def num_calls(runner: ModelRunner, plan: StepPlan) -> int:
    """How many functions of Python a plan calls, those of libraries included."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # a collection calls what others have registered for it
    sys.setprofile(note)
    try:
        ticket = runner.steps.launch(plan)
        runner.steps.collect(ticket)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_of_batch(runner: ModelRunner, num_sequences: int) -> list[int]:
    """The calls of a step that decodes, and of one before which all sequences begin a block."""
    slots, prompt = tuple(range(num_sequences)), draw(LENGTH)
    runner.steps.run(
        StepPlan(
            1,
            starts=tuple(started(slot, prompt, seed=slot) for slot in slots),
            tables=tuple(TableChange(slot, 0, packed([0, 1])) for slot in slots),
            entries=tuple(BatchEntry(slot, LENGTH - 2, 1, bytes(4), (slot,)) for slot in slots),
        )
    )
    pairs = np.array([(slot, 2) for slot in slots], "<u4").tobytes()
    decodes = packed(slots)
    counts = [
        num_calls(runner, plan)
        for plan in (StepPlan(2, decodes=decodes), StepPlan(3, grown=pairs, decodes=decodes))
    ]
    runner.steps.run(StepPlan(4, free_slots=slots))
    return counts


def test_a_step_calls_nothing_once_a_sequence(runner: ModelRunner) -> None:
    calls_of_batch(runner, 8)  # what is done once
    few, many = calls_of_batch(runner, 8), calls_of_batch(runner, MOST)
    assert many == few
    assert few[1] - few[0] <= 4, "growth is one change for all"
