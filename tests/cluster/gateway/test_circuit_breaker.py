"""Circuit breakers under a virtual clock: every transition against a naive model, silence that is the
gateway's own, probes, and what the router is told."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slow_cases import examples

from cluster.gateway.circuit_breaker import (
    FIRST_PAUSE_S,
    FORGET_S,
    MAX_PAUSE_S,
    NUM_FAILURES,
    SILENT_S,
    STALLED_S,
    TURN_S,
    BreakerState,
    CircuitBreaker,
    CircuitBreakers,
)
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity

D0, D1 = ReplicaIdentity("d0", 1), ReplicaIdentity("d1", 1)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class World:
    """Breakers with a router that remembers who is usable, and all transitions."""

    def __init__(self, *replicas: ReplicaIdentity) -> None:
        self.clock = ManualClock()
        self.usable: dict[str, bool] = {}
        self.transitions: list[tuple[str, BreakerState]] = []
        self.breakers = CircuitBreakers(self, self._on_transition, 0.0)
        for replica in replicas:
            self.join(replica)

    def set_usable(self, replica_id: str, is_usable: bool) -> None:
        self.usable[replica_id] = is_usable

    def join(self, replica: ReplicaIdentity) -> None:
        """As a router to which the replica was just added."""
        self.usable[replica.replica_id] = True
        self.breakers.joined(replica)

    def _on_transition(self, replica: ReplicaIdentity, breaker: CircuitBreaker) -> None:
        self.transitions.append((replica.replica_id, breaker.state))

    def of(self, replica: ReplicaIdentity) -> CircuitBreaker:
        breaker = self.breakers.of(replica)
        assert breaker is not None
        return breaker

    def fail(self, replica: ReplicaIdentity, request_id: str = "r", times: int = 1) -> None:
        for _ in range(times):
            self.breakers.failed(replica, request_id, "broke", self.clock.now())

    def succeed(self, replica: ReplicaIdentity, request_id: str = "r") -> None:
        self.breakers.succeeded(replica, request_id, self.clock.now())

    def report(self, replica: ReplicaIdentity, stalled_s: float = 0.0) -> None:
        self.breakers.heard(replica)
        self.breakers.reported(replica, stalled_s, self.clock.now())

    def wait(self, seconds: float, *talking: ReplicaIdentity) -> None:
        """Turn by turn, in each of which these replicas report."""
        for _ in range(round(seconds / TURN_S)):
            self.clock.advance(TURN_S)
            for replica in talking:
                self.report(replica)
            self.breakers.advance(self.clock.now())


def test_failures_in_a_row_open_and_a_probe_closes() -> None:
    world = World(D0, D1)
    world.fail(D0, times=NUM_FAILURES - 1)
    world.succeed(D0)
    world.fail(D0, times=NUM_FAILURES - 1)
    assert world.of(D0).state is CLOSED
    world.fail(D0)
    assert world.of(D0).state is OPEN
    assert world.usable == {"d0": False, "d1": True}
    assert "3 failures in a row" in world.of(D0).note
    world.succeed(D0)
    assert world.of(D0).state is OPEN, "a request that began before says nothing"
    world.wait(FIRST_PAUSE_S + TURN_S, D0, D1)
    assert world.of(D0).state is HALF_OPEN
    assert world.usable["d0"]
    world.breakers.submitted(D0, "probe")
    assert not world.usable["d0"], "one probe at a time"
    world.breakers.submitted(D0, "other")
    world.succeed(D0, "other")
    world.fail(D0, "other")
    assert world.of(D0).state is HALF_OPEN
    world.succeed(D0, "probe")
    assert world.of(D0).state is CLOSED
    assert world.usable["d0"]
    assert world.of(D0).note == ""
    assert world.transitions == [("d0", OPEN), ("d0", HALF_OPEN), ("d0", CLOSED)]


def test_a_probe_that_fails_opens_for_longer_and_one_that_says_nothing_frees_its_place() -> None:
    world = World(D0)
    world.fail(D0, times=NUM_FAILURES)
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        world.wait(pause_s - 2 * TURN_S, D0)
        assert world.of(D0).state is OPEN
        world.wait(3 * TURN_S, D0)
        assert world.of(D0).state is HALF_OPEN
        world.breakers.submitted(D0, "quiet")
        world.breakers.released("quiet")
        assert world.usable["d0"]
        world.breakers.submitted(D0, "probe")
        world.fail(D0, "probe")
        assert world.of(D0).state is OPEN


def test_the_pause_is_bounded_and_forgotten_after_long_service() -> None:
    world = World(D0)
    world.fail(D0, times=NUM_FAILURES)
    for _ in range(10):
        world.wait(MAX_PAUSE_S + TURN_S, D0)
        assert world.of(D0).state is HALF_OPEN
        world.breakers.submitted(D0, "probe")
        world.fail(D0, "probe")
    world.wait(MAX_PAUSE_S + TURN_S, D0)
    world.breakers.submitted(D0, "probe")
    world.succeed(D0, "probe")
    world.wait(FORGET_S + TURN_S, D0)
    world.fail(D0, times=NUM_FAILURES)
    world.wait(FIRST_PAUSE_S + TURN_S, D0)
    assert world.of(D0).state is HALF_OPEN


def test_silence_opens_and_the_second_report_after_it_closes() -> None:
    world = World(D0, D1)
    world.wait(SILENT_S - TURN_S, D1)
    assert world.of(D0).state is CLOSED
    world.wait(2 * TURN_S, D1)
    assert world.of(D0).is_stopped
    assert world.usable == {"d0": False, "d1": True}
    world.wait(60.0, D1)
    assert world.of(D0).state is OPEN, "no probe goes to a replica that stands still"
    world.report(D0)
    assert world.of(D0).state is OPEN
    world.wait(2 * TURN_S, D0, D1)
    assert world.of(D0).state is CLOSED
    assert world.transitions == [("d0", OPEN), ("d0", HALF_OPEN), ("d0", CLOSED)]


def test_a_stall_opens_and_slowness_does_not() -> None:
    world = World(D0)
    for _ in range(50):
        world.report(D0, 0.9 * STALLED_S)
        world.wait(TURN_S)
    assert world.transitions == []
    world.report(D0, STALLED_S)
    assert world.of(D0).is_stopped
    world.report(D0, 5.0)
    assert "no progress for 1.0 s" in world.of(D0).reason
    assert world.transitions == [("d0", OPEN)]


def test_a_gateway_that_did_not_run_itself_finds_nobody_silent() -> None:
    world = World(D0)
    world.wait(1.0, D0)
    world.clock.advance(30.0)
    world.breakers.advance(world.clock.now())
    assert world.of(D0).state is CLOSED
    world.wait(SILENT_S)
    assert world.of(D0).is_stopped


def test_a_replica_that_stops_again_and_again_is_avoided_for_longer() -> None:
    world = World(D0)
    pauses = []
    for _ in range(4):
        world.report(D0, STALLED_S)
        opened_at = world.clock.now()
        while world.of(D0).state is not CLOSED:
            world.wait(TURN_S, D0)
        pauses.append(world.clock.now() - opened_at)
    assert pauses == pytest.approx([1.1, 2.1, 4.1, 8.1], abs=0.2)


def test_a_stop_after_failures_still_needs_a_probe() -> None:
    world = World(D0)
    world.fail(D0, times=NUM_FAILURES)
    world.report(D0, STALLED_S)
    world.wait(10.0, D0)
    assert world.of(D0).state is HALF_OPEN
    world.breakers.submitted(D0, "probe")
    world.succeed(D0, "probe")
    assert world.of(D0).state is CLOSED


def test_links_that_end_count_and_a_life_keeps_its_breaker_while_the_next_one_begins_anew() -> None:
    world = World(D0)
    for _ in range(NUM_FAILURES):
        world.breakers.left(D0, "reset", world.clock.now())
        world.join(D0)
    assert world.of(D0).state is OPEN
    assert not world.usable["d0"], "the router knows it again as not usable"
    later = ReplicaIdentity("d0", 2)
    world.join(later)
    assert world.usable["d0"]
    assert world.breakers.of(D0) is None
    world.fail(D0, times=NUM_FAILURES)
    assert world.of(later).state is CLOSED


def test_a_replica_without_a_link_is_not_silent() -> None:
    world = World(D0)
    world.breakers.left(D0, "reset", world.clock.now())
    world.wait(20.0)
    assert world.of(D0).state is CLOSED
    world.breakers.forget("d0")
    assert world.breakers.of(D0) is None


class Machine(RuleBasedStateMachine):
    """One breaker against a model that keeps the whole history and derives the state from it."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker()
        self.now = 0.0
        # The model.
        self.state = CLOSED
        self.cause: set[str] = set()
        self.num_failures = 0
        self.num_openings = 0
        self.ends_at = self.closed_at = 0.0
        self.probe = ""
        self.is_stopped = False

    def opens(self, cause: str) -> None:
        if self.state is CLOSED and self.now >= self.closed_at + FORGET_S:
            self.num_openings = 0
        pause_s = min(FIRST_PAUSE_S * 2**self.num_openings, MAX_PAUSE_S)
        self.num_openings += 1
        self.state, self.probe, self.ends_at = OPEN, "", self.now + pause_s
        self.num_failures = 0
        self.cause.add(cause)

    def closes(self) -> None:
        self.state, self.probe, self.num_failures, self.closed_at = CLOSED, "", 0, self.now
        self.cause.clear()

    @rule(request=st.sampled_from(["", "a", "b"]))
    def fail(self, request: str) -> None:
        self.breaker.failed(request, "broke", self.now)
        if self.state is CLOSED:
            self.num_failures += 1
            if self.num_failures == NUM_FAILURES:
                self.opens("failures")
        elif self.state is HALF_OPEN and request in ("", self.probe):
            self.opens("failures")

    @rule(request=st.sampled_from(["a", "b"]))
    def succeed(self, request: str) -> None:
        self.breaker.succeeded(request, self.now)
        if self.state is CLOSED:
            self.num_failures = 0
        elif self.state is HALF_OPEN and self.probe == request:
            self.closes()

    @rule()
    def stop(self) -> None:
        self.breaker.stopped("still", self.now)
        if not self.is_stopped:
            self.is_stopped = True
            self.opens("stop")

    @rule()
    def progress(self) -> None:
        self.breaker.progressed(self.now)
        self.is_stopped = False
        if self.state is HALF_OPEN and self.cause == {"stop"}:
            self.closes()

    @rule(request=st.sampled_from(["a", "b"]))
    def submit(self, request: str) -> None:
        self.breaker.submitted(request)
        if self.state is HALF_OPEN and "failures" in self.cause and not self.probe:
            self.probe = request

    @rule(request=st.sampled_from(["a", "b"]))
    def release(self, request: str) -> None:
        self.breaker.released(request)
        if self.probe == request:
            self.probe = ""

    @rule(seconds=st.sampled_from([0.1, 0.9, 1.0, 5.0, 40.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.breaker.advance(self.now)
        if self.state is OPEN and not self.is_stopped and self.now >= self.ends_at:
            self.state = HALF_OPEN

    @precondition(lambda self: self.state is not CLOSED)
    @rule()
    def recover(self) -> None:
        """Whatever has happened, a replica that progresses and answers a probe is used again."""
        self.progress()
        self.wait(100.0)
        self.progress()
        if self.state is HALF_OPEN:
            self.release("a")
            self.release("b")
            self.submit("a")
            self.succeed("a")
        assert self.breaker.state is CLOSED

    @invariant()
    def is_as_the_model(self) -> None:
        assert (self.breaker.state, self.breaker.probe) == (self.state, self.probe)
        assert self.breaker.is_stopped == self.is_stopped
        wants_probe = self.state is HALF_OPEN and "failures" in self.cause and not self.probe
        assert self.breaker.is_usable == (self.state is CLOSED or wants_probe)
        assert bool(self.breaker.note) == (self.state is not CLOSED)
        assert not (self.is_stopped and self.state is HALF_OPEN)


Machine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
