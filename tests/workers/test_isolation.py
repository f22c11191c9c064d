"""Suspects run one at a time, each alone in its plans, and soon run with the others again."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace
from staged_engine import StagedEngine, ask, engine, finish, plan, right, step, unpack

from workers.messages.link import IsolationReport, Submission
from workers.scheduler.isolation import NUM_STEPS_TO_CLEAR


def names(side: StagedEngine) -> list[set[str]]:
    """Of the requests in each plan that is out."""
    return [
        {sequence.request.submission.request_id for sequence in issued.sequences}
        for issued in side.scheduler.issued
    ]


def suspect(name: str, token: int = 3, **options: object) -> Submission:
    return ask(name, [token, 7, 8], suspect=True, **options)  # type: ignore[arg-type]


def adopt(side: StagedEngine, submission: Submission) -> None:
    """As after a hand-over of its whole prompt, with the first token."""
    (block,) = side.pool.allocate(1)
    for stage in side.stages:
        stage.kv.update({(block, at): token for at, token in enumerate(unpack(submission.prompt))})
    first = right(submission)[0].to_bytes(4, "little")
    samples = (replace(submission.samples[0], output=first),)
    side.scheduler.adopt(replace(submission, samples=samples), [block], 3, 0.0)


def run(side: StagedEngine, depth: int) -> list[set[str]]:
    """Run until idle as the engine core does, `depth` plans out at most; who was in each plan."""
    plans: list[set[str]] = []
    while True:
        while len(side.plans) < depth and side.plan(0.0):
            plans.append(names(side)[-1])
            side.check()
        if not side.plans:
            return plans
        side.settle(0.0)
        side.check()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_suspect_is_alone_in_its_plans_until_it_is_cleared(num_stages: int) -> None:
    side = engine(num_stages=num_stages)
    side.scheduler.submit(ask("a", max_tokens=30), 0.0)
    step(side)
    side.scheduler.submit(suspect("s", max_tokens=12), 0.0)
    plans = run(side, num_stages + 1)
    last = max(number for number, named in enumerate(plans) if named == {"s"})
    assert sum("s" in named for named in plans[: last + 1]) >= NUM_STEPS_TO_CLEAR
    assert any({"a", "s"} == named for named in plans) or num_stages > 1, "once cleared, it runs with others"
    assert side.scheduler.isolation.take_reports() == [
        IsolationReport("s", 1, is_cleared=False),
        IsolationReport("s", 1, is_cleared=True),
    ]
    assert side.scheduler.is_idle


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_the_next_suspect_waits_while_a_plan_names_the_one_before(num_stages: int) -> None:
    """A fault in that plan must not be laid at its door. Both were adopted, so both are running."""
    side = engine(num_stages=num_stages)
    for name in "st":
        adopt(side, suspect(name, ord(name) - 90, max_tokens=6))
    plan(side)
    assert names(side) == [{"s"}]
    side.scheduler.cancel("s", 1)
    assert not side.plan(0.0)
    side.settle(0.0)
    assert {"t"} in run(side, num_stages + 1)
    assert side.scheduler.is_idle


def test_suspects_and_the_others_take_turns() -> None:
    side = engine(max_sequences=40, num_blocks=200)
    side.scheduler.submit(ask("a", max_tokens=300), 0.0)
    step(side)
    for index in range(16):
        side.scheduler.submit(suspect(f"s{index}", 20 + index, max_tokens=8), 0.0)
    plans = run(side, 2)
    while_running = plans[: max(number for number, named in enumerate(plans) if "a" in named)]
    gaps = "".join("." if "a" in named else "s" for named in while_running).split(".")
    assert max(map(len, gaps)) == 2, "nobody waits for more than two plans of suspects"
    num_alone = Counter(next(iter(named)) for named in while_running if len(named) == 1 and "a" not in named)
    assert set(num_alone.values()) == {NUM_STEPS_TO_CLEAR + 1}, "with the one that is out when it is cleared"


@pytest.mark.parametrize("num_stages", [1, 2])
def test_64_suspects_all_finish_with_the_right_tokens(num_stages: int) -> None:
    side = engine(max_sequences=64, num_blocks=300, num_stages=num_stages, max_batch_tokens=64)
    asked = [suspect(f"s{index}", index, max_tokens=6) for index in range(64)]
    for submission in asked:
        side.scheduler.submit(submission, 0.0)
    assert finish(side) == {(it.request_id, 0): right(it) for it in asked}


def test_one_suspect_at_a_time_and_none_overtakes_another() -> None:
    side = engine()
    for name in "abc":
        side.scheduler.submit(suspect(name, ord(name) - 90, max_tokens=9), 0.0)
    begun = [named for named in run(side, 2) if len(named) == 1]
    order = [next(iter(named)) for named in begun]
    assert [order.index(name) for name in "abc"] == sorted(order.index(name) for name in "abc")


def test_samples_of_a_suspect_are_alone_together() -> None:
    side = engine()
    asked = suspect("s", n=3, max_tokens=6)
    side.scheduler.submit(asked, 0.0)
    side.scheduler.submit(ask("a", max_tokens=6), 0.0)
    outputs = finish(side)
    assert {key: outputs[key] for key in outputs if key[0] == "s"} == {
        ("s", index): right(asked, index) for index in range(3)
    }


def test_of_suspects_to_hand_over_one_asks_for_its_landing_and_the_decode_side_clears_it() -> None:
    side = engine()
    for name in "st":
        side.scheduler.submit(suspect(name, ord(name) - 90, decode="d"), 0.0)
    assert [need.request_id for need in side.scheduler.landings_wanted(0.0)] == ["s"]
    assert side.scheduler.landings_wanted(0.0) == []
    side.scheduler.grant_landing("s", 1)
    (prompt,) = step(side).prompts
    assert prompt.submission.suspect
    assert side.scheduler.landings_wanted(0.0) == [], "it is still being handed over"
    assert side.scheduler.in_flight(()) == {("s", 1)}
    side.scheduler.finish_hand_over("s", 1)
    assert [need.request_id for need in side.scheduler.landings_wanted(0.0)] == ["t"]
    assert [it.is_cleared for it in side.scheduler.isolation.take_reports()] == [False]
    side.scheduler.cancel("t", 1)


def test_adopted_suspects_wait_for_their_turn_where_they_are() -> None:
    side = engine()
    asked = [suspect(name, ord(name) - 90, max_tokens=8) for name in "st"]
    for submission in asked:
        adopt(side, submission)
    assert names(side) == []
    plan(side)
    assert names(side) == [{"s"}]
    assert finish(side) == {(it.request_id, 0): right(it)[1:] for it in asked}


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_the_next_suspect_does_not_wait_for_one_that_is_gone(how: str) -> None:
    side = engine()
    side.scheduler.submit(suspect("s", max_tokens=9, deadline_s=5.0 if how == "deadline" else None), 0.0)
    side.scheduler.submit(suspect("t", 4, max_tokens=9), 0.0)
    side.scheduler.submit(ask("a", max_tokens=9), 0.0)
    while {"s"} not in names(side):
        assert side.plan(0.0) or side.settle(0.0)
    if how == "cancel":
        side.scheduler.cancel("s", 1)
    assert not side.plan(6.0), "the plan of the old one is still out"
    side.settle(6.0)
    assert plan(side, 6.0)
    outputs = finish(side)
    assert outputs.keys() == {("t", 0), ("a", 0)}


def test_a_preempted_suspect_lets_the_next_one_go_first() -> None:
    side = engine(num_blocks=5, max_sequences=4)
    asked = [ask("a", [5], max_tokens=14), suspect("s", 3, max_tokens=10), suspect("t", 4, max_tokens=10)]
    for submission in asked:
        side.scheduler.submit(submission, 0.0)
    outputs = finish(side)
    assert side.scheduler.life.num_preemptions > 0
    assert outputs == {(it.request_id, 0): right(it) for it in asked}


def test_a_suspect_gets_its_slot_though_others_wait_for_slots_too() -> None:
    side = engine(max_sequences=1)
    asked = [ask("a", [5], max_tokens=9), suspect("s", max_tokens=9), ask("b", [6], max_tokens=9)]
    for submission in asked:
        side.scheduler.submit(submission, 0.0)
    assert finish(side) == {(it.request_id, 0): right(it) for it in asked}


def test_in_flight_is_what_the_steps_name() -> None:
    side = engine(max_batch_tokens=6)
    side.scheduler.submit(ask("a"), 0.0)
    side.scheduler.submit(ask("b"), 0.0)
    plan(side)
    plan(side)
    assert names(side) == [{"a"}, {"a", "b"}]
    first, second = (issued.step for issued in side.scheduler.issued)
    assert side.scheduler.in_flight({first}) == {("a", 1)}
    assert side.scheduler.in_flight({second}) == {("a", 1), ("b", 1)}
    assert side.scheduler.in_flight(()) == set()
    finish(side)
