"""What the warm-up leaves for the steps that follow: no kernel to compile, and no memory to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_variants import launched_variants
from runner_parts import by_kernels

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from workers.messages.rank_channel import BatchEntry, BlockCopy, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.model import cuda, native
from workers.model.host_kv import MODES, OffloadMode
from workers.rank import warm_up
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity
from workers.rank.step_runner import StepRunner

BLOCK = 16
NUM_BLOCKS = 20
MAX_SEQUENCES = 3
VOCAB = 32

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


@pytest.fixture(autouse=True)
def _interpreted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the kernels of layers are interpreted too. That is slow: prompts of the warm-up are short, and
    rows of logits too."""
    from workers.model.cuda import sampling

    if device.type == "cpu":
        monkeypatch.setattr(cuda, "DEVICE_TYPES", {"cpu"})
        monkeypatch.setattr(native, "load", lambda: None)
        monkeypatch.setattr(warm_up, "WARM_UP_TOKENS", 7)
        monkeypatch.setattr(sampling, "_PIECE", VOCAB)
        monkeypatch.setattr(sampling, "_CANDIDATES", 16)


@pytest.fixture
def make(model_dir: Path, device: torch.device) -> Iterator[Make]:
    runners: list[ModelRunner] = []

    def make(
        mode: OffloadMode = "in_place",
        *,
        num_offload_blocks: int = 0,
        is_deterministic: bool = False,
        folder: Path = model_dir,
    ) -> ModelRunner:
        runner = ModelRunner(
            CheckpointFolder(folder),
            by_kernels(device, is_deterministic=is_deterministic),
            RankCapacity(
                BLOCK,
                NUM_BLOCKS * BLOCK,
                MAX_SEQUENCES,
                num_offload_tokens=num_offload_blocks * BLOCK,
                offload_mode=mode,
            ),
            SystemClock(),
        )
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def chunk(slot: int, start: int, num_tokens: int, *samples: int) -> BatchEntry:
    return BatchEntry(slot, start, num_tokens, packed([7] * num_tokens), samples)


def started(slot: int) -> SlotStart:
    return SlotStart(SamplingParams(), (SlotSample(slot, slot, 7),))


def steps() -> list[StepPlan]:
    """Chunks alone and beside sequences that decode, with and without slots that start or sample, so that
    what is uploaded together begins at multiples of 16 bytes and elsewhere."""
    slots = range(MAX_SEQUENCES)
    tables = tuple(TableChange(slot, 0, packed([3 * slot, 3 * slot + 1, 3 * slot + 2])) for slot in slots)
    return [
        StepPlan(1, starts=(started(0),), tables=tables[:1], entries=(chunk(0, 0, 1, 0),)),
        StepPlan(2, starts=(started(1),), tables=tables[1:2], entries=(chunk(1, 0, 3),), decodes=packed([0])),
        StepPlan(3, entries=(chunk(1, 3, 2, 1),), decodes=packed([0])),
        StepPlan(
            4, starts=(started(2),), tables=tables[2:], entries=(chunk(2, 0, 1),), decodes=packed([0, 1])
        ),
        StepPlan(5, entries=(chunk(2, 1, 2),)),
        StepPlan(6, entries=(chunk(2, 3, 4, 2),), decodes=packed([1, 0])),
        StepPlan(7, decodes=packed([2, 0, 1])),
    ]


def run(runner: ModelRunner, plans: Sequence[StepPlan]) -> None:
    for plan in plans:
        assert not runner.steps.run(plan).failed


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["any", "deterministic"])
def test_every_kernel_is_compiled_by_then(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
) -> None:
    monkeypatch.setattr(StepRunner, "graph_sizes", ())  # which have kernels of their own
    runner = make(is_deterministic=is_deterministic)
    with launched_variants() as known:
        runner.warm_up(9)
    with launched_variants() as met:
        run(runner, steps())
    assert met - known == set()
    assert {name for name, *_ in met} >= {"_rotate_and_write_kernel", "_rms_norm_kernel", "_rows_kernel"}


def test_so_are_those_of_experts(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of few rows and of many, whatever the lengths of the warm-up's own chunks."""
    from workers.model.experts import triton_experts

    monkeypatch.setattr(StepRunner, "graph_sizes", ())
    monkeypatch.setattr(triton_experts, "_FEW_ROWS", 1)
    write_random_checkpoint(
        tmp_path, "qwen3_moe", seed=3, vocab_size=VOCAB, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24,
    )  # fmt: skip
    with launched_variants() as known:
        runner = make(folder=tmp_path)
        runner.warm_up(9)
    with launched_variants() as met:
        run(runner, steps())
    assert met - known == set()
    of_products = {variant for variant in met if variant[0] == "_gate_up_kernel"}
    assert len({dict(described)["ROWS"] for _, *described in of_products}) == 2


@pytest.mark.parametrize("mode", MODES)
def test_so_is_what_reads_host_memory(make: Make, monkeypatch: pytest.MonkeyPatch, mode: OffloadMode) -> None:
    """Between two steps, the first block of two sequences moves there."""
    monkeypatch.setattr(StepRunner, "graph_sizes", ())
    runner = make(mode, num_offload_blocks=4)
    with launched_variants() as known:
        runner.warm_up(9)
    plans = steps()
    move = StepPlan(
        2,
        copies=(BlockCopy(0, NUM_BLOCKS), BlockCopy(3, NUM_BLOCKS + 3)),
        tables=(TableChange(0, 0, packed([NUM_BLOCKS])), TableChange(1, 0, packed([NUM_BLOCKS + 3]))),
        decodes=packed([0, 1]),
    )
    with launched_variants() as met:
        run(runner, [*plans[:3], move, *plans[3:]])
    assert met - known == set()
    assert any(dict(described).get("HAS_HOST") for _, *described in met)


@pytest.mark.gpu
def test_no_step_takes_pinned_memory(make: Make) -> None:
    """Two at a time. Torch would wait for the device to give it."""
    runner = make()
    runner.warm_up()
    taken = torch.cuda.host_memory_stats()["num_host_alloc"]
    tickets = []
    for plan in steps():
        tickets.append(runner.steps.launch(plan))
        if len(tickets) == 2:
            runner.steps.collect(tickets.pop(0))
    for ticket in tickets:
        runner.steps.collect(ticket)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == taken
