"""Layers with a recurrent state, with a real model and its scheduler: the tokens are those of `transformers`,
whatever the cache had, and a state that is not the sequence's is never read. All free states are NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from local_engine import BLOCK, LocalEngine, draw, packed, submitted
from paged_model import continued
from slow_cases import slow_but
from state_families import STATE_FAMILIES, write_state_checkpoint

from kvtransfer.common.faults import FaultRule, Faults
from workers.config import EngineConfig
from workers.messages.link import Submission
from workers.messages.sampling import SamplingParams, TokenLogprob
from workers.model.attention.groups_backend import GroupsPlan
from workers.model.attention.interface import DeviceStep, StepInput
from workers.model.kv_form import KvForm
from workers.model.kv_groups import GroupBytes, GroupLimit, StateCapacity, group_limits, kv_groups
from workers.model.model_config import read_model_config
from workers.model.state.state_step import NO_STATE
from workers.rank.device_queue import CpuQueue, DeviceQueue
from workers.rank.memory_profile import MemoryMeter, MemoryProfile, trial_blocks
from workers.scheduler.step import StepOutcome

CONFIG = EngineConfig(block_tokens=BLOCK, max_batch_tokens=96, chunk_tokens=64, max_sequences=4)
NUM_LAYERS = 4
SHARED = [token % 250 for token in draw(80, seed=1)]


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=slow_but(tuple(STATE_FAMILIES), "lfm2"))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_state_checkpoint(path, request.param)
    return path


@pytest.fixture(scope="module")
def convolution_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_state_checkpoint(path, "lfm2")
    return path


class PoisonedStates(LocalEngine):
    """An engine in which every free state is NaN."""

    def step(self) -> StepOutcome | None:
        outcome = super().step()
        for number, pool in enumerate(self.group_pools):
            for runner in self.runners:
                runner.window_kvs[number][pool._free] = float("nan")
        return outcome


def own(name: str, num_tokens: int) -> list[int]:
    return [token % 250 for token in draw(num_tokens, seed=sum(name.encode()))]


def ask(name: str, prompt: Sequence[int], max_tokens: int, *, n: int = 1) -> Submission:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return submitted(name, packed(prompt), sampling, n=n)


# More than run at a time; prompts that leave others within a block, and at a border; several samples.
REQUESTS = (
    ask("long", own("long", 150), 40),
    ask("grows", own("grows", 5), 70),
    ask("two", own("two", 40), 20, n=2),
    ask("shared a", [*SHARED, *own("a", 30)], 20),
    ask("shared b", [*SHARED[:70], *own("b", 30)], 20),
)
LATER = (
    ask("shared c", [*SHARED[:64], *own("c", 9)], 20),
    ask("shared d", [*SHARED, *own("a", 30)], 10),
    ask("long", own("long", 150), 50),
)


def check(model_dir: Path, engine: LocalEngine, requests: Sequence[Submission]) -> None:
    """Run requests, and compare what each sample gets with the reference."""
    outputs = engine.run(requests)
    assert not engine.failures
    for submission in requests:
        prompt = list(memoryview(submission.prompt).cast("I"))
        expected = packed(continued(model_dir, prompt, submission.sampling.max_tokens))
        for index in range(len(submission.samples)):
            assert outputs[submission.request_id, index] == expected, submission.request_id


def run(
    model_dir: Path,
    *,
    num_blocks: int = 60,
    tp: int = 1,
    stages: Sequence[tuple[int, int]] = ((0, NUM_LAYERS),),
    queue: DeviceQueue | None = None,
    config: EngineConfig = CONFIG,
) -> LocalEngine:
    engine = PoisonedStates(model_dir, config, num_blocks, tp=tp, stages=stages, queue=queue)
    (pool,) = engine.group_pools
    assert pool.has_states
    check(model_dir, engine, REQUESTS)
    again = [
        ask(f"turn of {it.request_id}", [*memoryview(it.prompt).cast("I"), *own("more", 6)], 12)
        for it in LATER
    ]
    check(model_dir, engine, [*LATER, *again])
    engine.close()
    return engine


SPLITS = [(1, "one"), (3, "one"), (1, "two"), (2, "two"), (1, "three")]
STAGES = {"one": [(0, 4)], "two": [(0, 1), (1, 4)], "three": [(0, 1), (1, 2), (2, 4)]}


@pytest.mark.parametrize("split", slow_but(SPLITS, (1, "one"), (1, "two")))
def test_the_tokens_are_those_of_the_reference(model_dir: Path, split: tuple[int, str]) -> None:
    tp, stages = split
    run(model_dir, tp=tp, stages=STAGES[stages])


def test_states_in_plain_torch(model_dir: Path, backend: str) -> None:
    run(model_dir)


def test_tables_of_states_are_on_the_device_too(model_dir: Path) -> None:
    run(model_dir, queue=CpuQueue())


@pytest.mark.parametrize(("num_blocks", "snapshots"), [(14, "auto"), (15, 0)])
def test_few_blocks_preempt_and_change_nothing(
    model_dir: Path, num_blocks: int, snapshots: int | str
) -> None:
    few = {"chunk_tokens": 20, "state_snapshots": snapshots}
    engine = run(model_dir, num_blocks=num_blocks, config=CONFIG.model_copy(update=few))
    assert engine.scheduler.life.num_preemptions > 0


def test_the_next_turn_of_a_chat_computes_only_what_is_new(model_dir: Path) -> None:
    engine = PoisonedStates(model_dir, CONFIG, 60, stages=STAGES["one"])
    first = ask("first", own("long", 100), 45)
    (output,) = engine.run([first]).values()
    history = [*memoryview(first.prompt).cast("I"), *memoryview(output).cast("I")]
    engine.plans.clear()
    check(model_dir, engine, [ask("second", [*history, *own("more", 7)], 9)])
    assert engine.plans[0].entries[0].start == 144, "the state behind the answer's last whole block"
    engine.close()


def test_log_probabilities_are_the_same_bit_for_bit_behind_a_snapshot(model_dir: Path) -> None:
    """Whatever the chunks were, and whether the state was computed or found."""
    config = CONFIG.model_copy(update={"deterministic": True})
    engine = PoisonedStates(model_dir, config, 60, stages=STAGES["one"])
    prompt, sampling = own("long", 150), SamplingParams(max_tokens=20, ignore_eos=True, num_logprobs=3)

    def run(name: str, tokens: Sequence[int]) -> tuple[int, list[TokenLogprob]]:
        engine.scheduler.submit(submitted(name, packed(tokens), sampling), 0.0)
        engine.plans.clear()
        read: list[TokenLogprob] = []
        while (outcome := engine.step()) is not None:
            read += [it for delta in outcome.tokens for it in delta.logprobs]
        return engine.plans[0].entries[0].start, read

    first, whole = run("first", prompt)
    again, found = run("again", prompt)
    assert (first, again) == (0, 144)
    assert found == whole
    for pool in engine.group_pools:
        pool.purge(None)
    engine.scheduler.config = engine.scheduler.config.model_copy(update={"max_batch_tokens": 23})
    third, recomputed = run("third", prompt)
    assert third == 0
    assert recomputed == whole
    engine.close()


# -------------------------------------------------------------------------------------------- failures


class Failing(Faults):
    """Lets the layers of steps fail when they contain one of two slots, as often as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Faults()

    @property
    def armed(self) -> bool:
        return self.current.armed

    def at(self, point: str) -> bool:
        return self.current.at(point)


FAILING = [(1, "one", 0), (1, "two", 0), (1, "two", 1), (3, "one", 1)]


@pytest.mark.parametrize(
    ("tp", "stages", "rank"), [FAILING[0], *(pytest.param(*it, marks=pytest.mark.slow) for it in FAILING[1:])]
)
def test_an_attempt_that_fails_once_costs_nobody_a_token(
    model_dir: Path, tmp_path: Path, tp: int, stages: str, rank: int
) -> None:
    """In the middle of the layers of a step that decodes: some states have moved on, others have not."""
    faults = [Failing() for _ in range(tp * len(STAGES[stages]))]
    engine = PoisonedStates(model_dir, CONFIG, 60, tp=tp, stages=STAGES[stages], faults=faults)
    rule = FaultRule(f"rank.layers.decode.{rank}", "raise", str(tmp_path / "marker"), 12)
    for each in faults:
        each.current = Faults([rule])
    check(model_dir, engine, REQUESTS)
    assert (tmp_path / "marker").exists()
    assert engine.scheduler.life.num_preemptions > 0
    for each in faults:
        each.current = Faults()
    check(model_dir, engine, LATER)
    engine.close()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("stages", ["one", "two"])
def test_a_poison_request_fails_alone_all_the_same(
    model_dir: Path, tmp_path: Path, stages: str, kind: str
) -> None:
    """Whenever slot 1 computes. The others lose their states, start over, and have their tokens."""
    faults = [Failing() for _ in STAGES[stages]]
    engine = PoisonedStates(model_dir, CONFIG, 60, stages=STAGES[stages], faults=faults)
    rule = FaultRule(f"rank.layers.{kind}.0.1", "raise", str(tmp_path / "marker"), 1, 1 << 30)
    for each in faults:
        each.current = Faults([rule])
    outputs = engine.run(REQUESTS)
    failed = set(engine.failures)
    assert failed
    for submission in REQUESTS:
        expected = packed(
            continued(
                model_dir, list(memoryview(submission.prompt).cast("I")), submission.sampling.max_tokens
            )
        )
        got = outputs.get((submission.request_id, 0), b"")
        assert expected.startswith(got)
        assert submission.request_id in failed or got == expected
    engine.close()


# ---------------------------------------------------------------------------------------------- memory


def test_states_have_blocks_for_sequences_and_snapshots(convolution_dir: Path) -> None:
    config = read_model_config(convolution_dir)
    groups, form = kv_groups(config), KvForm(4)
    assert [(group.layers, group.window > 0) for group in groups] == [((2,), False), ((0, 1, 3), True)]
    counted = group_limits(config, groups, form, None, StateCapacity(4, 2, 5), BLOCK)
    assert counted == [GroupLimit(2 * 6 + 3 + 5, has_states=True)]
    (limit,) = group_limits(config, groups, form, None, StateCapacity(4), BLOCK)
    kv_bytes, state_bytes = 2 * 3 * BLOCK * 16 * 4, 3 * 2 * 96 * 4  # two columns of 96 channels, 3 layers
    assert limit.share == pytest.approx(0.25 * kv_bytes / state_bytes)
    assert [limit.most_blocks(count) for count in (3, 100)] == [3, 2 * 6 + 2 + int(100 * limit.share)]


class KvMeter:
    """Notes the KV of a trial in place of what a device has."""

    def __init__(self) -> None:
        self.kv_bytes = 0

    def step_done(self, kv_bytes: int) -> None:
        self.kv_bytes = kv_bytes

    def profile(self, num_graphs: int, buffer_bytes: int) -> MemoryProfile:
        return MemoryProfile(0, 0, num_graphs, 0, buffer_bytes)


def test_a_trial_of_the_largest_steps_takes_one_state(convolution_dir: Path) -> None:
    engine = LocalEngine(convolution_dir, CONFIG, 40, stages=STAGES["one"])
    (runner,), meter = engine.runners, KvMeter()
    runner._profile(cast(MemoryMeter, meter), 96, 0)
    full, states = runner.layouts
    num_blocks = trial_blocks(96, runner.config.max_context_tokens, BLOCK)
    assert meter.kv_bytes == num_blocks * full.block_bytes + states.block_bytes
    engine.close()


def test_a_recorded_step_finds_the_tables_of_every_group_on_the_device(convolution_dir: Path) -> None:
    """The host knows nothing of its tables."""
    engine = LocalEngine(convolution_dir, CONFIG, 40, stages=STAGES["one"])
    (runner,) = engine.runners
    tables = torch.tensor([[3, 4], [5, 6]], dtype=torch.int32)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    starts = torch.tensor([BLOCK, 0], dtype=torch.int32)
    device = DeviceStep(tables, slots, starts, torch.ones_like(slots), 2 * BLOCK, [tables + 10])
    plan = runner.attention.plan(StepInput.on_device(device, np.ones(2, np.int32), BLOCK))
    assert isinstance(plan, GroupsPlan)
    assert plan.state_step is not None
    found = plan.state_step.device
    assert found is not None
    assert (found.reads.tolist(), found.writes.tolist()) == ([15, NO_STATE], [16, 13])
    engine.close()


@pytest.mark.parametrize("num_bytes", [0, 99, 640, 1000, 5001, 20_000])
def test_states_take_their_part_of_the_memory(num_bytes: int) -> None:
    sizes = GroupBytes([40, 300], [GroupLimit(3, 0.125, has_states=True)])
    fitting = sizes.fitting_blocks(num_bytes)
    assert sizes.bytes_of(fitting) <= num_bytes < sizes.bytes_of(fitting + 1)
    assert sizes.saved_bytes(fitting) == 0
    assert sizes.state_bytes(fitting) == 300 * (2 if fitting == 1 else min(fitting, 3 + fitting // 8))
