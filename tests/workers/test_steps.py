"""The step loop: a slow step is not a hung one, and a hung rank is noticed, idle or busy."""

from __future__ import annotations

from typing import Any

import pytest

from kvtransfer.clock import ManualClock
from workers.config import EngineConfig
from workers.engine.blocks import BlockPool
from workers.engine.scheduler import Scheduler
from workers.messages import SampledToken, SampleState, SamplingParams, StepPlan, StepReport, Submission
from workers.steps import StepLoop

NUM_TOKENS = 100


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1.0)


@pytest.fixture
def sent() -> list[StepPlan]:
    return []


@pytest.fixture
def steps(clock: ManualClock, sent: list[StepPlan]) -> StepLoop:
    config = EngineConfig(block_tokens=16, kv_tokens=1024)
    pool = BlockPool(64, 16)
    limits: dict[str, Any] = {"eos_token_ids": (), "max_context_tokens": 1024, "fingerprint": b"f" * 16}
    scheduler = Scheduler(config, pool, **limits)
    prompt = b"".join(number.to_bytes(4, "little") for number in range(NUM_TOKENS))
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    submission = Submission(
        "r", 0, "", 0, prompt, (b"k" * 16,) * 6, (SampleState(0, 1),), sampling, None, None
    )
    scheduler.submit(submission, clock.now())
    return StepLoop(scheduler, sent.append, clock)


def report(plan: StepPlan, seconds: float) -> StepReport:
    tokens = tuple(SampledToken(slot, 5, None) for entry in plan.entries for slot in entry.sample_slots)
    return StepReport(plan.step, tokens, 10.0, 10.0 + seconds)


def test_a_first_step_of_unknown_rate_has_time(steps: StepLoop, clock: ManualClock) -> None:
    steps.feed()
    clock.advance(4 * NUM_TOKENS / 20 + 4.9)
    assert not steps.is_stalled(5.0)
    clock.advance(0.2)
    assert steps.is_stalled(5.0)


def test_once_measured_a_hung_step_is_noticed_soon(
    steps: StepLoop, clock: ManualClock, sent: list[StepPlan]
) -> None:
    steps.feed()
    while sent[-1].entries[0].num_tokens > 1 and len(sent) < 2:
        steps.feed()
    for plan in (sent[0], sent[1]):
        clock.advance(0.1)
        steps.settle(report(plan, 0.1))
    steps.feed()
    assert not steps.is_stalled(5.0)
    clock.advance(5.0)
    assert not steps.is_stalled(5.0)
    clock.advance(4 * 0.1 + 0.1)
    assert steps.is_stalled(5.0)


def test_an_idle_rank_is_probed_and_its_silence_noticed(clock: ManualClock, sent: list[StepPlan]) -> None:
    limits: dict[str, Any] = {"eos_token_ids": (), "max_context_tokens": 64, "fingerprint": b"f" * 16}
    idle = StepLoop(
        Scheduler(EngineConfig(block_tokens=16, kv_tokens=256), BlockPool(16, 16), **limits),
        sent.append,
        clock,
    )
    clock.advance(2.1)
    assert idle.probe(2.0)
    assert not sent[-1].entries
    clock.advance(5.1)
    assert idle.is_stalled(5.0)
    assert idle.settle(report(sent[-1], 0.0)) is None
    assert not idle.is_stalled(5.0)
