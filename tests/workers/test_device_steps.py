"""Steps whose tokens stay on the device, here on CPU tensors: they have the tokens of steps whose tokens pass
through the host. Without Triton's interpreter there are no graphs; tests/gpu has those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from local_engine import BLOCK, SEEDED, LocalEngine, draw, entry, packed, started, step, submitted
from runner_parts import ON_CPU

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import FaultRule, Faults
from workers.config import EngineConfig
from workers.messages.link import Submission
from workers.messages.rank_channel import StepPlan, StepReport
from workers.messages.sampling import SamplingParams
from workers.rank.device_queue import CpuQueue, DeviceQueue
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

CONFIG = EngineConfig(block_tokens=BLOCK, max_batch_tokens=96, chunk_tokens=40, max_sequences=8)
POISON_SLOT = 1


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "llama", seed=3)
    return path


def ask(name: str, num_prompt: int, *, n: int = 1, num_logprobs: int | None = None) -> Submission:
    prompt = packed(draw(num_prompt, seed=num_prompt))
    sampling = SamplingParams(
        temperature=SEEDED.temperature,
        repetition_penalty=SEEDED.repetition_penalty,
        max_tokens=9,
        ignore_eos=True,
        num_logprobs=num_logprobs,
    )
    return submitted(name, prompt, sampling, n=n)


# Slots are taken in this order: the second, whose prompt has several chunks, is in the slot of the poison.
REQUESTS = (ask("first", 20), ask("poison", 100), ask("two", 30, n=2), ask("last", 70, num_logprobs=2))


def run(engine: LocalEngine) -> tuple[dict[tuple[str, int], bytes], set[str]]:
    outputs = engine.run(REQUESTS)
    assert engine.pool.num_referenced == 0
    failed = set(engine.failures)
    engine.close()
    return outputs, failed


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[tuple[str, int], bytes]:
    outputs, failed = run(LocalEngine(model_dir, CONFIG, 60))
    assert not failed
    return outputs


@pytest.mark.parametrize("tp", [1, 2])
def test_requests_have_the_tokens_that_the_host_would_pass_on(
    model_dir: Path, expected: dict[tuple[str, int], bytes], tp: int
) -> None:
    """Two ranks, over gloo, get the tokens from the one that samples."""
    assert run(LocalEngine(model_dir, CONFIG, 60, tp=tp, queue=CpuQueue())) == (expected, set())


def test_blocks_in_host_memory_are_read(model_dir: Path, expected: dict[tuple[str, int], bytes]) -> None:
    config = EngineConfig(
        block_tokens=BLOCK, max_batch_tokens=96, chunk_tokens=40, max_sequences=8, offload_at=0.4
    )
    engine = LocalEngine(model_dir, config, 14, 30, queue=CpuQueue())
    assert run(engine) == (expected, set())
    assert engine.most_offloaded > 0


@pytest.mark.parametrize(
    ("point", "after"),
    [("layers.prefill", 3), ("layers.decode", 6), ("sampling.prefill", 1), ("sampling.decode", 3)],
)
def test_a_request_that_cannot_be_computed_fails_alone(
    model_dir: Path, expected: dict[tuple[str, int], bytes], tmp_path: Path, point: str, after: int
) -> None:
    """Whenever its step is computed again, in parts, the others have the same tokens."""
    phase, kind = point.split(".")
    rule = FaultRule(f"rank.{phase}.{kind}.0.{POISON_SLOT}", "raise", str(tmp_path / "m"), after, 1 << 30)
    engine = LocalEngine(model_dir, CONFIG, 60, queue=CpuQueue(), faults=[Faults([rule])])
    outputs, failed = run(engine)
    assert failed == {"poison"}
    assert {name: tokens for name, tokens in outputs.items() if name[0] != "poison"} == {
        name: tokens for name, tokens in expected.items() if name[0] != "poison"
    }


@pytest.fixture
def make(model_dir: Path) -> Iterator[Callable[[DeviceQueue | None], ModelRunner]]:
    runners: list[ModelRunner] = []

    def make(queue: DeviceQueue | None) -> ModelRunner:
        runners.append(
            ModelRunner(
                CheckpointFolder(model_dir),
                ON_CPU._replace(queue=queue),
                RankCapacity(BLOCK, 40 * BLOCK),
                ManualClock(5.0),
            )
        )
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def plans() -> list[StepPlan]:
    """A prompt and two decoding steps, with and without a chunk of another prompt, and a fork."""
    one, two = draw(18, seed=1), draw(40, seed=2)
    sampling = SamplingParams(temperature=1.0, num_logprobs=1)
    return [
        step(entry(1, 0, one, (0, 1), [1, 3]), starts=[started(1, one, sampling), started(3, one)]),
        step(entry(2, 0, two[:30], (4, 5)), entry(1, 18, [], (0, 1), [1]), starts=[started(2, two)]),
        step(entry(2, 30, two[30:], (4, 5, 6), [2]), entry(3, 18, [], (0, 2), [3])),
        StepPlan(4, decodes=packed([3, 1, 2])),
        StepPlan(5, decodes=packed([2])),
    ]


def test_the_next_step_is_launched_with_tokens_that_nobody_has_collected(
    make: Callable[[DeviceQueue | None], ModelRunner],
) -> None:
    def results(reports: list[StepReport]) -> list[object]:
        return [(it.tokens, [(row.row, row.logprob.top[0][0]) for row in it.logprobs]) for it in reports]

    runner = make(CpuQueue())
    tickets = [runner.steps.launch(plan) for plan in plans()]
    ahead = [runner.steps.collect(ticket) for ticket in tickets]
    one_by_one = make(None)
    assert results(ahead) == results([one_by_one.steps.run(plan) for plan in plans()])
    assert all(ticket.event.query() for ticket in tickets)


def test_masks_come_between_the_halves(make: Callable[[DeviceQueue | None], ModelRunner]) -> None:
    runner = make(CpuQueue())
    first, *_ = plans()
    executed = runner.steps.execute(first)
    masks = np.full((2, 256 // 32), 0xFFFFFFFF, np.uint32)
    masks[1] = 0
    masks[1, 77 // 32] = 1 << 77 % 32
    report = runner.steps.collect(runner.steps.sample(executed, masks))
    assert np.frombuffer(report.tokens, "<u4")[1] == 77


def test_the_scratch_block_is_none_of_the_pools(make: Callable[[DeviceQueue | None], ModelRunner]) -> None:
    runner = make(CpuQueue())
    assert len(runner.kv) == runner.ready_fields.num_blocks == 40
    assert len(runner.attention.kv) == 41
    assert runner.attention.kv.data_ptr() == runner.kv.data_ptr()
