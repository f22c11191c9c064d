"""Graphs of decoding steps: which sizes there are and what padding does, on any device; what only a CUDA
graph has, on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from runner_parts import ON_CPU

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from workers.messages.rank_channel import BatchEntry, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.model import cuda, native
from workers.model.kv_groups import WindowCapacity
from workers.model.rank_memory import graph_sizes
from workers.rank.device_queue import CpuQueue, CudaQueue, DeviceQueue, Graph, Recorder, Work, make_queue
from workers.rank.device_steps import DeviceSteps
from workers.rank.model_runner import ModelRunner
from workers.rank.progress import Progress
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

BLOCK = 16
MAX_SEQUENCES = 11
NUM_PROMPT = 20
# Of which the second continues what the first has left.
NUM_DECODES = 2

Make = Callable[[], ModelRunner]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "llama", seed=3, vocab_size=128, max_position_embeddings=4096)
    return path


@pytest.fixture
def make(model_dir: Path, device: torch.device) -> Iterator[Make]:
    runners: list[ModelRunner] = []

    def make() -> ModelRunner:
        queue = CpuQueue(has_triton=True) if device.type == "cpu" else None
        runners.append(make_runner(model_dir, device, queue))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def make_runner(
    model_dir: Path, device: torch.device, queue: DeviceQueue | None, windows: WindowCapacity | None = None
) -> ModelRunner:
    return ModelRunner(
        CheckpointFolder(model_dir),
        ON_CPU._replace(device=device, queue=queue),
        RankCapacity(BLOCK, 80 * BLOCK, MAX_SEQUENCES, windows=windows),
        SystemClock(),
    )


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def prompts(num_sequences: int) -> StepPlan:
    """Starts so many sequences, each with its own prompt and space to grow, half of them greedy."""
    draws = np.random.default_rng(0).integers(0, 128, (num_sequences, NUM_PROMPT)).tolist()
    params = SamplingParams(temperature=1.2), SamplingParams()
    return StepPlan(
        1,
        starts=tuple(
            SlotStart(params[slot % 2], (SlotSample(slot, slot, tokens[-1]),))
            for slot, tokens in enumerate(draws)
        ),
        tables=tuple(
            TableChange(slot, 0, packed(range(4 * slot, 4 * slot + 4))) for slot in range(num_sequences)
        ),
        entries=tuple(
            BatchEntry(slot, 0, NUM_PROMPT, packed(tokens), (slot,)) for slot, tokens in enumerate(draws)
        ),
    )


def outputs(runner: ModelRunner, plans: Sequence[StepPlan]) -> list[bytes]:
    """The tokens of all plans, each launched before the one before is collected."""
    tickets = [runner.steps.launch(plan) for plan in plans]
    reports = [runner.steps.collect(ticket) for ticket in tickets]
    assert not any(report.failed for report in reports)
    return [report.tokens for report in reports]


def occupy(num_cycles: int) -> None:
    """Queue a kernel that takes so many cycles of the device."""
    torch.cuda._sleep(num_cycles)  # type: ignore[no-untyped-call]


def test_sizes_are_few_and_waste_less_than_a_step_of_eight_rows() -> None:
    assert graph_sizes(1) == graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(9) == (1, 2, 4, 8, 16)
    sizes = graph_sizes(256)
    assert (len(sizes), sizes[-1]) == (35, 256)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_padding_writes_to_the_scratch_block_alone(make: Make, num_rows: int) -> None:
    """A step of some rows in a graph of eight: every other block is what the same step without padding
    makes it."""
    runners = make(), make()
    runners[0].steps.record_graphs((8,))
    plans = [prompts(num_rows), StepPlan(2, decodes=packed(range(num_rows)))]
    padded, alone = (outputs(runner, plans) for runner in runners)
    assert padded == alone
    torch.testing.assert_close(runners[0].kv, runners[1].kv, atol=1e-5, rtol=1e-5)
    scratch = [runner.attention.kv[len(runner.kv) :] for runner in runners]
    assert scratch[0].any()
    assert not scratch[1].any()


GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 128,
}


EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("family", "keys"),
    [("gemma2", {}), ("olmo2", {}), ("gemma4_text", GEMMA_4), ("qwen3_moe", EXPERTS)],
)
def test_a_graph_caps_and_normalizes_as_steps_do(
    device: torch.device, tmp_path: Path, family: str, keys: dict[str, Any]
) -> None:
    """Families whose logits are capped in place, whose queries and keys are normalized by rows, whose layers
    have heads of two sizes and inputs of their own, and whose layers have experts."""
    write_random_checkpoint(tmp_path, family, seed=3, vocab_size=128, **keys)
    queue = CpuQueue(has_triton=True) if device.type == "cpu" else None
    runners = [make_runner(tmp_path, device, queue) for _ in range(2)]
    runners[0].steps.record_graphs((2,))
    plans = [prompts(2), *(StepPlan(step, decodes=packed(range(2))) for step in (2, 3, 4))]
    by_graph, by_kernel = (outputs(runner, plans) for runner in runners)
    assert by_graph == by_kernel
    for runner in runners:
        runner.close()


WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 18,
    "max_window_layers": 1,
}


def with_group_tables(plan: StepPlan) -> StepPlan:
    """The plan with tables of the group behind the first, whose blocks are others."""
    tables = [
        TableChange(it.slot, it.first, packed([1 + slot for slot in np.frombuffer(it.block_ids, "<u4")]), 1)
        for it in plan.tables
    ]
    return msgspec.structs.replace(plan, tables=(*plan.tables, *tables))


@pytest.mark.parametrize("family", ["qwen3", "lfm2", "qwen3_5_text"])
def test_a_graph_finds_what_each_group_of_layers_keeps(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Layers with a window whose KV lies apart, and layers with a state, with rows of padding beside."""
    if device.type == "cpu":  # let all be computed by kernels for CUDA
        monkeypatch.setattr(cuda, "DEVICE_TYPES", {"cpu"})
        monkeypatch.setattr(native, "load", lambda: None)
    if family == "qwen3":
        write_random_checkpoint(tmp_path, family, seed=3, vocab_size=128, **WINDOWS)
    else:
        pytest.importorskip("transformers", reason="transformers, which makes the model, is not installed")
        from state_families import write_state_checkpoint

        write_state_checkpoint(tmp_path, family)
    queue = CpuQueue(has_triton=True) if device.type == "cpu" else None
    windows = WindowCapacity(BLOCK, MAX_SEQUENCES, 64) if family == "qwen3" else None
    runners = [make_runner(tmp_path, device, queue, windows) for _ in range(2)]
    assert len(runners[0].layouts) == 2
    runners[0].steps.record_graphs((4,))
    decodes = [StepPlan(step, decodes=packed(range(3))) for step in range(2, 2 + NUM_DECODES)]
    plans = [with_group_tables(prompts(3)), *decodes]
    by_graph, by_kernel = (outputs(runner, plans) for runner in runners)
    assert by_graph == by_kernel
    for graph, kernel in zip(runners[0].window_kvs, runners[1].window_kvs, strict=True):
        torch.testing.assert_close(graph, kernel, atol=1e-4, rtol=1e-4)
    for runner in runners:
        runner.close()


class CountedReplays(CpuQueue):
    """A CPU whose graphs note how many rows they had when they were replayed."""

    def __init__(self) -> None:
        super().__init__(has_triton=True)
        self.num_rows: list[int] = []

    def recorder(self) -> Recorder:
        return CountingRecorder(self.num_rows)


class CountingRecorder(Recorder):
    def __init__(self, num_rows: list[int]) -> None:
        self._num_rows = num_rows

    def record(self, work: Work) -> Graph:
        return CountedGraph(work, self._num_rows)


class CountedGraph(Graph):
    def __init__(self, work: Work, num_rows: list[int]) -> None:
        self._work = work
        self._num_rows = num_rows

    def replay(self) -> tuple[torch.Tensor, ...]:
        results = self._work()
        self._num_rows.append(len(results[0]))
        return results


def test_a_graph_has_been_replayed_when_its_first_step_comes(model_dir: Path, device: torch.device) -> None:
    """Once, over rows of padding, which leave the KV as it was."""
    if device.type == "cuda":
        pytest.skip("counted on a CPU")
    queue = CountedReplays()
    runner = make_runner(model_dir, device, queue)
    runner.kv.fill_(3.0)
    runner.steps.record_graphs((1, 4))
    assert queue.num_rows == [4, 1]
    assert (runner.kv == 3.0).all()
    runner.close()


@pytest.mark.gpu
def test_graphs_are_recorded_after_others_are_gone(device: torch.device) -> None:
    """As a rank does that measures its memory first. What a product leaves to the library outlives them."""
    queue = CudaQueue(device)
    matrix = torch.randn(512, 512, device=device)
    expected = matrix @ matrix
    for _ in range(2):
        graph = queue.recorder().record(partial(_squared, matrix))
        (result,) = graph.replay()
        torch.testing.assert_close(result, expected)
        del graph, result


def _squared(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (matrix @ matrix,)


@pytest.mark.gpu
def test_graphs_of_all_sizes_compute_what_eager_steps_do(make: Make) -> None:
    recorded, eager = make(), make()
    recorded.warm_up()
    steps = recorded.steps.steps
    assert isinstance(steps, DeviceSteps)
    assert steps.graphs.size_for(MAX_SEQUENCES) == 16
    plans = [prompts(MAX_SEQUENCES)]
    plans += [StepPlan(2, decodes=packed(range(count))) for count in (1, 2, 3, 5, 8, 9, MAX_SEQUENCES) * 3]
    assert outputs(recorded, plans) == outputs(eager, plans)


@pytest.mark.gpu
def test_memory_of_graphs_stays_when_larger_steps_come(make: Make) -> None:
    """A chunk larger than any step of the warm-up makes scratch memory grow; what graphs were captured with
    is not what it replaces."""
    recorded, eager = make(), make()
    recorded.warm_up(32)
    chunk = BatchEntry(10, 0, 900, packed([7] * 900), (10,))
    start = SlotStart(SamplingParams(), (SlotSample(10, 0, 7),))
    large = StepPlan(
        3, starts=(start,), tables=(TableChange(10, 0, packed(range(20, 77))),), entries=(chunk,)
    )
    plans = [prompts(4), *[StepPlan(2, decodes=packed(range(4)))] * 3, large]
    plans += [StepPlan(4, decodes=packed([0, 1, 2, 3, 10]))] * 4
    assert outputs(recorded, plans) == outputs(eager, plans)


def _times(tensor: torch.Tensor, factor: float) -> tuple[torch.Tensor, ...]:
    return (tensor * factor,)


@pytest.mark.gpu
def test_graphs_share_memory_with_what_they_compute(device: torch.device) -> None:
    """Graphs that return 64 MiB each take little more than one; each returns its own result until the next
    replay."""
    recorder = CudaQueue(device).recorder()
    source = torch.ones(16 << 20, device=device)
    before = torch.cuda.memory_reserved(device)  # other files run beside this one
    graphs = [recorder.record(partial(_times, source, factor)) for factor in (1.0, 2.0, 3.0, 4.0)]
    assert torch.cuda.memory_reserved(device) - before < 160 << 20
    for factor, graph in zip((1.0, 2.0, 3.0, 4.0), graphs, strict=True):
        (result,) = graph.replay()
        assert (result[0].item(), result[-1].item()) == (factor, factor)


@pytest.mark.gpu
def test_a_launch_returns_before_its_step_is_done(make: Make, device: torch.device) -> None:
    """Behind a kernel that takes a while, steps are launched with tokens that no host has seen."""
    runner = make()
    runner.warm_up()
    runner.steps.run(prompts(4))
    plan = StepPlan(2, decodes=packed(range(4)))
    occupy(200_000_000)  # for 0.1 s and more
    began_at = time.monotonic()
    tickets = [runner.steps.launch(plan) for _ in range(2)]
    launched_s = time.monotonic() - began_at
    assert not tickets[0].event.query()
    assert launched_s < 0.05
    for ticket in tickets:
        assert len(runner.steps.collect(ticket).tokens) == 16


@pytest.mark.gpu
def test_a_step_that_hangs_on_the_device_makes_no_progress(device: torch.device) -> None:
    """The only mark of a graph is its end; the step after it may be launched already."""
    queue = make_queue(device)
    progress = Progress(queue)
    progress.begin(1)
    occupy(400_000_000)
    progress.mark_layer()
    progress.begin(2)
    progress.mark_layer()
    assert progress.read() == (1, 0)
    queue.event().synchronize()
    assert progress.read() == (2, 2)


@pytest.mark.gpu
def test_a_sum_of_nccl_is_captured(device: torch.device) -> None:
    """With a group of one rank. Not yet validated with more."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    from torch.distributed import ProcessGroupNCCL

    group: Any = ProcessGroupNCCL(dist.HashStore(), 0, 1, ProcessGroupNCCL.Options())  # type: ignore[attr-defined]
    group.eager_connect_single_device(device)
    value = torch.ones(1024, device=device)

    def work() -> tuple[torch.Tensor, ...]:
        value.add_(1.0)
        group.allreduce([value]).wait()
        return ()

    work()
    graph = CudaQueue(device).recorder().record(work)
    for _ in range(3):
        graph.replay()
    torch.cuda.current_stream(device).synchronize()
    assert value[0].item() == 5.0
    group.abort()
