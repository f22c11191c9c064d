"""Graphs of steps with a chunk beside sequences that decode: each computes what the step without one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from runner_parts import by_kernels

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from workers.messages.rank_channel import BatchEntry, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.rank import mixed_graphs
from workers.rank.device_steps import DeviceSteps
from workers.rank.mixed_graphs import MixedSize, mixed_sizes
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

BLOCK, NUM_BLOCKS, VOCAB = 16, 30, 64
MAX_SEQUENCES = 3
SIZES = (MixedSize(8, 2), MixedSize(24, 2), MixedSize(24, 8))
PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, 40)]

Make = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a window in some layers."""
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(
        path, "qwen3", seed=3, vocab_size=VOCAB, use_sliding_window=True, sliding_window=8,
        max_window_layers=1,
    )  # fmt: skip
    return path


@pytest.fixture
def make(model_dir: Path, device: torch.device) -> Iterator[Make]:
    runners: list[ModelRunner] = []

    def make(*, is_deterministic: bool = False) -> ModelRunner:
        runner = ModelRunner(
            CheckpointFolder(model_dir),
            by_kernels(device, is_deterministic=is_deterministic),
            RankCapacity(BLOCK, NUM_BLOCKS * BLOCK, MAX_SEQUENCES, mixed_tokens=24),
            SystemClock(),
        )
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def chunk(slot: int, start: int, end: int, *samples: int) -> BatchEntry:
    return BatchEntry(slot, start, end - start, packed(PROMPT[start:end]), samples)


def started(slot: int, params: SamplingParams) -> SlotStart:
    return SlotStart(params, (SlotSample(slot, slot, PROMPT[0]),))


def plans() -> list[StepPlan]:
    """Two sequences decode while a third one's prompt is computed in chunks of several lengths, which end in
    the middle of a block and at its end, and then decodes, too."""
    tables = [TableChange(slot, 0, packed(range(5 * slot, 5 * slot + 4))) for slot in range(MAX_SEQUENCES)]
    greedy, random = SamplingParams(num_logprobs=2), SamplingParams(temperature=1.2)
    return [
        StepPlan(1, starts=(started(0, greedy),), tables=(tables[0],), entries=(chunk(0, 0, 9, 0),)),
        StepPlan(2, starts=(started(1, random),), tables=(tables[1],), entries=(chunk(1, 0, 5, 1),)),
        StepPlan(3, decodes=packed([0, 1])),
        StepPlan(
            4, starts=(started(2, greedy),), tables=(tables[2],), entries=(chunk(2, 0, 11),),
            decodes=packed([0, 1]),
        ),
        StepPlan(5, entries=(chunk(2, 11, 32),), decodes=packed([1, 0])),
        StepPlan(6, entries=(chunk(2, 32, 40, 2),), decodes=packed([0])),
        StepPlan(7, decodes=packed([2, 0, 1])),
        StepPlan(8, decodes=packed([0, 1, 2])),
    ]  # fmt: skip


def run(runner: ModelRunner) -> list[object]:
    """Return tokens and log-probabilities of all plans, each launched before the one before is collected."""
    tickets = [runner.steps.launch(plan) for plan in plans()]
    reports = [runner.steps.collect(ticket) for ticket in tickets]
    assert not any(report.failed for report in reports)
    return [
        (report.tokens, [(it.row, round(it.logprob.logprob, 4)) for it in report.logprobs])
        for report in reports
    ]


def replayed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[MixedSize]:
    """Record graphs of all sizes; return a list to which the sizes are added that are replayed."""
    sizes: list[MixedSize] = []
    runner.steps.record_mixed(SIZES)
    steps = runner.steps.steps
    assert isinstance(steps, DeviceSteps)
    assert steps.mixed is not None
    replay = steps.mixed.run

    def note(plan, rows, size, containment):  # type: ignore[no-untyped-def]
        sizes.append(size)
        return replay(plan, rows, size, containment)

    monkeypatch.setattr(steps.mixed, "run", note)
    return sizes


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["any", "deterministic"])
def test_a_replay_computes_what_the_step_does(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
) -> None:
    recorded, plain = (make(is_deterministic=is_deterministic) for _ in range(2))
    sizes = replayed(recorded, monkeypatch)
    assert run(recorded) == run(plain)
    assert sizes == [MixedSize(24, 2), MixedSize(24, 2), MixedSize(8, 2)]
    # Nothing was written but what the plans name: rest of the chunks' last blocks, and scratch.
    written = [0, 5, *range(10, 13)]
    other = [block for block in range(NUM_BLOCKS) if block not in written]
    assert not recorded.kv[other].any()
    prompt = recorded.kv[10:12], plain.kv[10:12]
    torch.testing.assert_close(*prompt, atol=1e-5, rtol=1e-5)


def test_steps_of_other_kinds_are_not_replayed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make()
    sizes = replayed(runner, monkeypatch)
    first, second, *_ = plans()
    for plan in (
        first,
        second,
        StepPlan(3, entries=(chunk(1, 5, 7), chunk(0, 9, 12)), decodes=b""),
        StepPlan(4, entries=(chunk(1, 7, 40),), decodes=packed([0])),
    ):
        runner.steps.run(plan)
    assert sizes == []


def test_the_sizes_are_usual_ones() -> None:
    assert mixed_sizes(100, 4) == ()
    assert mixed_sizes(300, 9) == (
        MixedSize(128, 8), MixedSize(128, 32), MixedSize(256, 8), MixedSize(256, 32),
    )  # fmt: skip
    assert len(mixed_sizes(4096, 256)) == 25
    assert mixed_graphs.mixed_sizes(2048, 256)[-1] == MixedSize(2048, 256)
