"""A rank could not compute entries of a plan: what the scheduler makes of it, with later plans already
out."""

from __future__ import annotations

import pytest
from staged_engine import BLOCK_TOKENS, StagedEngine, ask, engine, finish, plan, right, unpack

from workers.messages.link import RequestFailed
from workers.messages.rank_channel import FailedEntry, StepReport
from workers.scheduler.step import StepOutcome

LONG = [number % 20 + 1 for number in range(24)]


def settle(side: StagedEngine, *failed: int) -> StepOutcome:
    """Report the oldest plan, these entries as failed."""
    step = side.steps[0]
    while step.num_stages_done < side.num_stages:
        assert side.advance(step.num_stages_done)
    side.steps.popleft()
    step.sampled |= {slot: 0 for index in failed for slot in step.works[index].sample_slots}
    entries = tuple(FailedEntry(index, "no memory") for index in failed)
    report = StepReport(step.plan.step, step.packed, 0.0, 0.0, failed=entries)
    outcome = side.scheduler.settle(report, 0.0)
    side.check()
    return outcome


def failures(outcome: StepOutcome) -> set[tuple[str, str, str]]:
    return {(failure.request_id, failure.code, failure.reason) for failure in outcome.failures}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_request_ends_and_the_others_go_on(num_stages: int) -> None:
    side = engine(num_stages=num_stages)
    first, lost, last = ask("first"), ask("lost", [3, 4, 5]), ask("last", [6, 7, 8, 9])
    for submission in (first, lost, last):
        side.scheduler.submit(submission, 0.0)
    while side.plan(0.0) and len(side.steps) < num_stages + 1:
        pass
    index = next(i for i, entry in enumerate(side.plans[0].entries) if unpack(entry.tokens) == [3, 4, 5])
    outcome = settle(side, index)
    assert failures(outcome) == {("lost", "internal", "a step failed: no memory")}
    assert {delta.request_id for delta in outcome.tokens} <= {"first", "last"}
    told = {(delta.request_id, delta.sample): unpack(delta.tokens) for delta in outcome.tokens}
    rest = finish(side)
    assert {key: told.get(key, []) + rest[key] for key in rest} == {
        ("first", 0): right(first),
        ("last", 0): right(last),
    }


def test_what_was_not_computed_is_not_found_again() -> None:
    """Three chunks of two blocks: the first is in the prefix cache, the second failed, the third was already
    out and is worth nothing."""
    side = engine(num_stages=2, max_batch_tokens=8, chunk_tokens=8)
    side.scheduler.submit(ask("a", LONG), 0.0)
    for _ in range(3):
        plan(side)
    assert not settle(side).failures
    assert len(settle(side, 0).failures) == 1
    assert not settle(side).failures, "it is told once"
    assert side.scheduler.is_idle
    assert side.pool.num_referenced == 0
    again = ask("b", LONG)
    side.scheduler.submit(again, 0.0)
    assert plan(side).entries[0].start == 2 * BLOCK_TOKENS
    assert finish(side) == {("b", 0): right(again)}


def test_all_samples_of_the_request_end() -> None:
    side = engine()
    side.scheduler.submit(ask("a", n=3), 0.0)
    plan(side)
    settle(side)
    assert plan(side).num_sequences == 3
    outcome = settle(side, 1)
    assert [failure.request_id for failure in outcome.failures] == ["a"]
    assert len(outcome.tokens) <= 1, "those settled before it"
    assert side.scheduler.is_idle
    assert side.pool.num_referenced == 0


def test_a_prompt_for_another_replica_fails_like_any_other() -> None:
    side = engine(max_batch_tokens=8, chunk_tokens=8)
    side.scheduler.submit(ask("a", LONG, decode="d"), 0.0)
    side.scheduler.grant_landing("a", 1)
    plan(side)
    assert [chunk.num_computed_tokens for chunk in settle(side).chunks] == [8]
    plan(side)
    plan(side)
    outcome = settle(side, 0)
    assert outcome.failures == [RequestFailed("a", 1, "internal", "a step failed: no memory", suspect=True)]
    assert not outcome.chunks
    assert not settle(side).chunks
    assert side.scheduler.is_idle
    assert side.pool.num_referenced == 0


def test_a_preempted_sequence_whose_last_step_failed_does_not_come_back() -> None:
    side = engine(num_blocks=4, max_batch_tokens=16)
    victim = ask("victim", [1, 2, 3, 4, 5], max_tokens=8)
    side.scheduler.submit(victim, 0.0)
    plan(side)
    settle(side)
    plan(side)  # a token of the victim, which is preempted while this plan is out
    sequence = side.scheduler.life.running[0]
    side.scheduler.life.preempt(sequence)
    outcome = settle(side, 0)
    assert [failure.request_id for failure in outcome.failures] == ["victim"]
    assert finish(side) == {}
