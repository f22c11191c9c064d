"""Classes and priorities in the scheduler: who goes first, that nobody starves, and a paused batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples
from staged_engine import StagedEngine, ask, engine, finish, right, step, unpack

from kvtransfer.request_facts import SERVICE_CLASSES, ServiceClass
from workers.scheduler.sequence import CLASS_DELAY_S, DUE_PER_PRIORITY_S


def run(side: StagedEngine, outputs: dict[str, list[int]], num_steps: int = 1, now: float = 0.0) -> None:
    for _ in range(num_steps):
        for delta in step(side, now).tokens:
            outputs.setdefault(delta.request_id, []).extend(unpack(delta.tokens))


def test_classes_go_first_by_their_delays() -> None:
    side = engine(max_sequences=1)
    for name in reversed(SERVICE_CLASSES):
        side.scheduler.submit(ask(name, [len(name)], max_tokens=1, service_class=name), 0.0)
    order = [delta.request_id for _ in range(3) for delta in step(side).tokens]
    assert order == ["interactive", "standard", "batch"]


@settings(deadline=None, max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.sampled_from(SERVICE_CLASSES), st.integers(0, 3), st.floats(0.0, 400.0)),
        min_size=2,
        max_size=12,
    )
)
def test_nobody_is_overtaken_by_who_comes_so_much_later(
    arrivals: list[tuple[ServiceClass, int, float]],
) -> None:
    """Priorities and classes count as seconds; and of two of one class and priority the first goes first."""
    side = engine(max_sequences=1)
    now, asked = 0.0, []
    for number, (service_class, priority, gap_s) in enumerate(arrivals):
        now += gap_s
        name = f"r{number}"
        side.scheduler.submit(
            ask(name, [number + 1], max_tokens=1, service_class=service_class, priority=priority), now
        )
        asked.append((name, now, service_class, priority))
    order = [delta.request_id for _ in asked for delta in step(side).tokens]
    place = {name: index for index, name in enumerate(order)}
    assert len(place) == len(asked)
    for name, arrived_at, service_class, priority in asked:
        for other, later_at, other_class, other_priority in asked:
            if place[other] < place[name] and later_at > arrived_at:
                gained_s = DUE_PER_PRIORITY_S * (other_priority - priority)
                gained_s += CLASS_DELAY_S[service_class] - CLASS_DELAY_S[other_class]
                assert later_at - arrived_at <= gained_s


def test_a_paused_batch_stands_still_beside_others_and_goes_on_after_them() -> None:
    side = engine(max_sequences=4)
    outputs: dict[str, list[int]] = {}
    batch = ask("b", [1, 2, 3], max_tokens=12, service_class="batch")
    other = ask("o", [4, 5, 6], max_tokens=6)
    side.scheduler.submit(batch, 0.0)
    side.scheduler.submit(other, 0.0)
    run(side, outputs)
    side.scheduler.pause.ask(True)
    before = len(outputs["b"])
    assert side.scheduler.counts.num_paused == 1
    while len(outputs["o"]) < 6:
        run(side, outputs)
        assert len(outputs["b"]) == before
    assert side.scheduler.life.num_preemptions == 0
    run(side, outputs, 12 - before)  # nobody else is there: it runs although it is paused
    assert outputs == {"b": right(batch), "o": right(other)}
    assert side.scheduler.counts.num_paused == 0
    assert side.scheduler.is_idle


def test_what_has_waited_longest_of_what_its_class_may_goes_first() -> None:
    """Time in the gateway counts."""
    side = engine(max_sequences=1)
    asked: list[tuple[str, ServiceClass, float]] = [
        ("a", "interactive", 4.0),
        ("b", "batch", 3.0),
        ("c", "standard", -1.0),
    ]
    for name, service_class, due_s in asked:
        side.scheduler.submit(ask(name, [1], max_tokens=1, service_class=service_class, due_s=due_s), 0.0)
    assert [delta.request_id for _ in range(3) for delta in step(side).tokens] == ["c", "b", "a"]


def test_a_paused_batch_that_has_waited_too_long_gets_a_tenth_of_the_steps() -> None:
    side = engine(max_sequences=4)
    outputs: dict[str, list[int]] = {}
    batch = ask("b", [1, 2, 3], max_tokens=8, service_class="batch", due_s=5.0)
    side.scheduler.submit(batch, 0.0)
    side.scheduler.submit(ask("o", [4, 5, 6], max_tokens=60), 0.0)
    run(side, outputs)
    side.scheduler.pause.ask(True)
    before = len(outputs["b"])
    run(side, outputs, 4)
    assert len(outputs["b"]) == before
    assert side.scheduler.counts.num_paused == 1
    run(side, outputs, 30, now=5.0)
    assert len(outputs["b"]) == before + 3
    assert side.scheduler.counts.num_paused == 0, "it does not make way any more"
    finish(side)


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["batch", "batch", "pause", "go on", "cancel"]),
            st.integers(1, 4),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 3),
)
@pytest.mark.slow
def test_no_batch_request_starves_however_often_its_class_is_paused(
    given_events: list[tuple[str, int, int]], num_stages: int
) -> None:
    """Others always wait, more than there are places. From when it is due a request needs no more than ten
    steps for each token of those before it, and of its own, beside what others need to leave their places."""
    side = engine(max_sequences=2, num_stages=num_stages)
    waiting: dict[str, int] = {}  # by name: the step in which it must have ended
    ended: set[str] = set()
    num_others = num_steps = 0

    def others() -> None:
        nonlocal num_others
        while side.scheduler.counts.num_waiting < 3:
            num_others += 1
            side.scheduler.submit(ask(f"o{num_others}", [num_others % 50 + 1], max_tokens=3), 0.0)

    def steps(number: int) -> None:
        nonlocal num_steps
        for _ in range(number):
            others()
            num_steps += 1
            for delta in step(side).tokens:
                if delta.finish:
                    ended.add(delta.request_id)
            for name, latest in waiting.items():
                assert name in ended or num_steps <= latest, f"{name} starves"

    for number, (what, num_tokens, num) in enumerate(given_events):
        if what == "batch":
            name = f"b{number}"
            side.scheduler.submit(
                ask(name, [number + 1], max_tokens=num_tokens, service_class="batch", due_s=0.0), 0.0
            )
            pending = [each for each in waiting if each not in ended]
            waiting[name] = num_steps + 60 * (len(pending) + 1)
        elif what == "cancel":
            for name in [each for each in waiting if each not in ended][:1]:
                side.scheduler.cancel(name, 1)
                ended.add(name)
        else:
            side.scheduler.pause.ask(what == "pause")
        steps(num)
    steps(60 * (len(waiting) + 1))
    assert {*waiting} <= ended


def test_a_paused_batch_continues_when_it_is_not_paused_any_more() -> None:
    side = engine(max_sequences=4)
    outputs: dict[str, list[int]] = {}
    side.scheduler.submit(ask("b", [1, 2, 3], max_tokens=12, service_class="batch"), 0.0)
    side.scheduler.submit(ask("o", [4, 5, 6], max_tokens=12), 0.0)
    assert side.scheduler.counts.num_backlog_tokens == 6
    side.scheduler.pause.ask(True)
    assert side.scheduler.counts.num_backlog_tokens == 3, "nobody waits for what is paused"
    run(side, outputs, 3)
    assert "b" not in outputs
    assert side.scheduler.counts.num_backlog_tokens == 0
    side.scheduler.pause.ask(False)
    assert side.scheduler.counts.num_backlog_tokens == 3
    run(side, outputs, 3)
    assert len(outputs["b"]) == 3
    finish(side)


@pytest.mark.parametrize("lacking", ["blocks", "sequences"])
def test_a_paused_batch_makes_way_for_who_waits(lacking: str) -> None:
    side = engine(max_sequences=2 if lacking == "sequences" else 4, num_blocks=8)
    outputs: dict[str, list[int]] = {}
    num_tokens = 3 if lacking == "sequences" else 12
    batch = [
        ask(f"b{number}", [number + 1] * num_tokens, max_tokens=10, service_class="batch")
        for number in range(2)
    ]
    for submission in batch:
        side.scheduler.submit(submission, 0.0)
    run(side, outputs, 4)
    side.scheduler.pause.ask(True)
    other = ask("o", [9] * 7, max_tokens=5)
    side.scheduler.submit(other, 1.0)
    run(side, outputs, 8)
    assert outputs["o"] == right(other)
    assert side.scheduler.life.num_preemptions >= 1
    while not side.scheduler.is_idle:
        run(side, outputs)
    assert outputs == {it.request_id: right(it) for it in (*batch, other)}


def test_a_paused_prompt_is_ahead_of_no_landing() -> None:
    """The rest of it is more than what may be ahead of a prompt that asks for its landing."""
    side = engine(max_batch_tokens=4)
    side.scheduler.submit(ask("a", list(range(1, 31)), service_class="batch"), 0.0)
    step(side)
    side.scheduler.pause.ask(True)
    side.scheduler.submit(ask("b", decode="d"), 1.0)
    (need,) = side.scheduler.landings_wanted(1.0)
    assert need.request_id == "b"


def test_a_paused_batch_is_cancelled_and_expires_as_ever() -> None:
    side = engine(max_sequences=4)
    outputs: dict[str, list[int]] = {}
    side.scheduler.submit(ask("o", [4, 5, 6], max_tokens=20), 0.0)
    for name in ("cancelled", "late"):
        deadline_s = 5.0 if name == "late" else None
        submission = ask(name, [1, 2, 3], max_tokens=12, service_class="batch", deadline_s=deadline_s)
        side.scheduler.submit(submission, 0.0)
    run(side, outputs, 2)
    side.scheduler.pause.ask(True)
    run(side, outputs)
    assert side.scheduler.cancel("cancelled", 1)
    side.plan(6.0)
    outcome = side.settle(6.0)
    assert [(it.request_id, it.code) for it in outcome.failures] == [("late", "deadline")]
    finish(side)
    assert side.scheduler.is_idle
