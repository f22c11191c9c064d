"""Graphs of steps with a chunk, alone or beside sequences that decode: each computes what the step without a
graph does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from grammar_harness import choice, small_grammars
from launch_recorder import recorded_launches
from runner_parts import by_kernels

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from workers.messages.rank_channel import BatchEntry, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.model import cuda, native
from workers.rank import mixed_graphs
from workers.rank.compiled_grammars import CompiledGrammars
from workers.rank.device_queue import CpuQueue, DeviceQueue, Graph, Recorder, Work
from workers.rank.device_steps import DeviceSteps
from workers.rank.mixed_graphs import MixedSize, mixed_sizes
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

BLOCK, NUM_BLOCKS, VOCAB = 16, 30, 64
MAX_SEQUENCES = 3
SIZES = (MixedSize(8, 2), MixedSize(24, 2), MixedSize(24, 8))
LONE_SIZES = (MixedSize(8, 0), MixedSize(24, 0))
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

    def make(
        *,
        is_deterministic: bool = False,
        grammars: CompiledGrammars | None = None,
        queue: DeviceQueue | None = None,
    ) -> ModelRunner:
        settings = by_kernels(device, is_deterministic=is_deterministic)
        runner = ModelRunner(
            CheckpointFolder(model_dir),
            settings if queue is None else settings._replace(queue=queue),
            RankCapacity(BLOCK, NUM_BLOCKS * BLOCK, MAX_SEQUENCES, mixed_tokens=24),
            SystemClock(),
            grammars=grammars,
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


def run(runner: ModelRunner, plans: Sequence[StepPlan]) -> list[object]:
    """Return tokens and log-probabilities of all plans, each launched before the one before is collected."""
    tickets = [runner.steps.launch(plan) for plan in plans]
    reports = [runner.steps.collect(ticket) for ticket in tickets]
    assert not any(report.failed for report in reports)
    return [
        (report.tokens, [(it.row, round(it.logprob.logprob, 4)) for it in report.logprobs])
        for report in reports
    ]


def replayed(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, recorded: Sequence[MixedSize] = SIZES
) -> list[MixedSize]:
    """Record graphs of these sizes; return a list to which the sizes are added that are replayed."""
    sizes: list[MixedSize] = []
    runner.steps.record_mixed(recorded)
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
    assert run(recorded, plans()) == run(plain, plans())
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


def table(slot: int, *block_ids: int) -> TableChange:
    return TableChange(slot, 0, packed(block_ids))


def lone_plans(grammar: bytes, most_blocks: int) -> list[StepPlan]:
    """Chunks that are alone: of a prompt that is preempted in its middle and begins again in other blocks, of
    one with penalties, at the end of a context of `most_blocks`, of one from which two samples fork, and of
    one whose output follows a grammar. At the end some sequences decode."""
    greedy, random = SamplingParams(num_logprobs=2), SamplingParams(temperature=1.2)
    penalized = SamplingParams(
        temperature=0.8, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3, num_logprobs=1
    )
    with_prompt = SlotStart(penalized, (SlotSample(1, 7, PROMPT[0]),), packed(PROMPT[:24]))
    fork = SlotStart(random, (SlotSample(2, 5, PROMPT[0]), SlotSample(3, 6, PROMPT[0])))
    bound = SlotStart(random, (SlotSample(4, 8, PROMPT[0]),), grammar=grammar)
    at_end = BatchEntry(5, most_blocks * BLOCK - 6, 6, packed(PROMPT[:6]), (5,))
    return [
        StepPlan(1, starts=(started(0, greedy),), tables=(table(0, 0, 1),), entries=(chunk(0, 0, 11),)),
        StepPlan(2, entries=(chunk(0, 11, 17),)),
        StepPlan(
            3, free_slots=(0,), starts=(started(0, greedy),), tables=(table(0, 15, 16, 17),),
            entries=(chunk(0, 0, 20),),
        ),
        StepPlan(4, entries=(chunk(0, 20, 32, 0),)),
        StepPlan(5, starts=(with_prompt,), tables=(table(1, 5, 6),), entries=(chunk(1, 0, 24, 1),)),
        StepPlan(
            6, starts=(started(5, greedy),), tables=(table(5, *[21] * (most_blocks - 1), 22),),
            entries=(at_end,),
        ),
        StepPlan(
            7, starts=(fork,), tables=(table(2, 10, 11), table(3, 10, 20)), entries=(chunk(2, 0, 16, 2, 3),)
        ),
        StepPlan(8, starts=(bound,), tables=(table(4, 25),), entries=(chunk(4, 0, 9),)),
        StepPlan(9, entries=(chunk(4, 9, 13, 4),)),
        StepPlan(10, decodes=packed([3, 0, 1])),
    ]  # fmt: skip


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["any", "deterministic"])
def test_a_replay_of_a_chunk_alone_computes_what_the_step_does(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
) -> None:
    grammars, grammar = small_grammars(tmp_path, vocab_size=VOCAB), choice(("abcab", "cab"))
    grammars.compile(grammar)
    recorded, plain = (make(is_deterministic=is_deterministic, grammars=grammars) for _ in range(2))
    plans = lone_plans(grammar.digest, plain.steps.batch.tables.shape[1])
    sizes = replayed(recorded, monkeypatch, LONE_SIZES)
    assert run(recorded, plans) == run(plain, plans)
    small, large = LONE_SIZES
    # The step from which two samples fork and the one that samples by a grammar are none.
    assert sizes == [large, small, large, large, large, small, large]
    # Nothing was written but what the plans name, rest of the chunks' last blocks, and scratch.
    whole, written = [0, 5, 10, 15, 16], [0, 1, 5, 6, 10, 15, 16, 17, 20, 22, 25]
    other = [block for block in range(NUM_BLOCKS) if block not in written]
    assert not recorded.kv[other].any()
    most = 0 if is_deterministic else 1e-5
    torch.testing.assert_close(recorded.kv[whole], plain.kv[whole], atol=most, rtol=most)


def test_a_chunk_alone_and_one_beside_others_have_graphs_of_their_own(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make()
    sizes = replayed(runner, monkeypatch, (MixedSize(8, 0), MixedSize(24, 2)))
    first, second, *_ = plans()
    for plan in (
        first,
        second,
        StepPlan(3, entries=(chunk(1, 5, 10),)),
        StepPlan(4, entries=(chunk(1, 10, 15),), decodes=packed([0])),
        StepPlan(5, entries=(chunk(1, 15, 24),)),
    ):
        runner.steps.run(plan)
    assert sizes == [MixedSize(8, 0), MixedSize(8, 0), MixedSize(24, 2)]


# What brings a plan to the device and tokens to the host, whatever the number of layers.
COPIES = {"aten::copy_", "aten::clone", "aten::index_put_", "aten::index_copy_"}


class OneLaunchQueue(CpuQueue):
    """A CPU where what a graph launches counts as one launch, as on CUDA."""

    def __init__(self) -> None:
        super().__init__(has_triton=True)
        self.launches: list[str] = []

    def recorder(self) -> Recorder:
        return OneLaunchRecorder(self)


class OneLaunchRecorder(Recorder):
    def __init__(self, queue: OneLaunchQueue) -> None:
        self._queue = queue

    def record(self, work: Work) -> Graph:
        return OneLaunchGraph(work, self._queue)


class OneLaunchGraph(Graph):
    def __init__(self, work: Work, queue: OneLaunchQueue) -> None:
        self._work, self._queue = work, queue

    def replay(self) -> tuple[torch.Tensor, ...]:
        launches = self._queue.launches
        num_before = len(launches)
        results = self._work()
        launches[num_before:] = ["graph"]
        return results


def test_a_chunk_alone_is_one_launch_beside_its_copies(
    make: Make, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the first token of a short prompt does not wait for the launches of every layer."""
    if device.type == "cuda":
        pytest.skip("counted on a CPU")
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {"cpu"})  # let all be computed by kernels for CUDA
    monkeypatch.setattr(native, "load", lambda: None)
    queues = OneLaunchQueue(), OneLaunchQueue()
    recorded, plain = (make(queue=queue) for queue in queues)
    recorded.steps.record_mixed(LONE_SIZES[:1])
    prompt = StepPlan(
        1, starts=(started(0, SamplingParams()),), tables=(table(0, 0),), entries=(chunk(0, 0, 7, 0),)
    )
    for runner, queue in zip((recorded, plain), queues, strict=True):
        with recorded_launches() as queue.launches:
            runner.steps.launch(prompt)
    as_graph, by_kernel = (queue.launches for queue in queues)
    assert len(by_kernel) > 10 * plain.config.num_layers
    assert as_graph.count("graph") == 1
    assert {*as_graph} - {"graph"} <= COPIES
    assert len(as_graph) < 10


def test_chunks_over_latents_have_no_graphs(tmp_path: Path, device: torch.device) -> None:
    """Their attention is planned at the host."""
    write_random_checkpoint(tmp_path, "deepseek_v3", seed=3, vocab_size=VOCAB)
    runner = ModelRunner(
        CheckpointFolder(tmp_path),
        by_kernels(device),
        RankCapacity(BLOCK, NUM_BLOCKS * BLOCK, MAX_SEQUENCES, mixed_tokens=128),
        SystemClock(),
    )
    assert runner.steps.graph_sizes
    assert runner.steps.mixed_sizes == ()
    runner.close()


def test_the_sizes_are_usual_ones() -> None:
    assert mixed_sizes(63, 4) == ()
    assert mixed_sizes(100, 4) == (MixedSize(64, 0),)
    assert mixed_sizes(300, 9) == (
        MixedSize(64, 0), MixedSize(128, 0), MixedSize(256, 0),
        MixedSize(128, 8), MixedSize(128, 32), MixedSize(256, 8), MixedSize(256, 32),
    )  # fmt: skip
    assert len(mixed_sizes(4096, 256)) == 3 + 25
    assert mixed_graphs.mixed_sizes(2048, 256)[-1] == MixedSize(2048, 256)
