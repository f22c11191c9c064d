"""Requests that a replica has refused, and when refused clients may come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.admission.retries import EndRate, Retry, RetryQueue
from router.messages import Decision


class Capacities:
    """Replicas that have capacity for so many more requests each."""

    def __init__(self, **free: int) -> None:
        self.free = free
        self.placed: dict[str, str] = {}
        self.submitted: list[str] = []
        self.rerouted: list[str] = []

    def has_capacity(self, request_id: str) -> bool:
        return self.free[self.placed[request_id]] > 0

    def on_submitted(self, request_id: str) -> None:
        self.submitted.append(request_id)
        self.free[self.placed[request_id]] -= 1

    def retry(self, request_id: str, replica_id: str, release: Callable[[Retry], None]) -> Retry:
        self.placed[request_id] = replica_id
        return Retry(
            Decision(request_id, "cost", "", replica_id, 0, 0, (), ""),
            release,
            lambda it: self.rerouted.append(it.decision.request_id),
        )


def test_a_retry_goes_when_its_pair_has_capacity_the_first_refused_first() -> None:
    capacities, released = Capacities(d0=0, d1=1), []
    queue = RetryQueue(capacities)
    for name, replica_id in (("a", "d0"), ("b", "d0"), ("c", "d1")):
        queue.hold(capacities.retry(name, replica_id, lambda it: released.append(it.decision.request_id)))
    assert released == ["c"]
    capacities.free["d0"] = 1
    queue.pump()
    assert released == ["c", "a"]
    capacities.free["d0"] = 1
    queue.pump()
    assert released == capacities.submitted == ["c", "a", "b"]
    assert len(queue) == 0


def test_who_ended_is_forgotten_and_who_waits_for_a_replica_that_goes_is_placed_once_more() -> None:
    capacities, released = Capacities(d0=0, d1=0), []
    queue = RetryQueue(capacities)
    retries = [
        capacities.retry(name, replica_id, lambda it: released.append(it.decision.request_id))
        for name, replica_id in (("a", "d0"), ("b", "d0"), ("c", "d1"))
    ]
    for retry in retries:
        queue.hold(retry)
    assert queue.drop(retries[0])
    assert not queue.drop(retries[0])
    queue.leave("d0")
    assert capacities.rerouted == ["b"]
    assert released == capacities.submitted == []
    assert len(queue) == 1


@given(st.data())
def test_every_retry_is_released_or_dropped_once_whatever_a_release_does(data: st.DataObject) -> None:
    """Also where a release holds the request again, or lets another end."""
    capacities = Capacities(d0=0, d1=0, d2=0)
    queue = RetryQueue(capacities)
    waiting: dict[str, Retry] = {}
    num_held = num_released = num_dropped = 0

    def release(retry: Retry) -> None:
        nonlocal num_released
        name = retry.decision.request_id
        assert waiting.pop(name) is retry
        num_released += 1
        if data.draw(st.integers(0, 3)) == 0 and num_held < 40:
            hold(name)
        elif data.draw(st.booleans()):
            drop()

    def hold(name: str) -> None:
        nonlocal num_held
        num_held += 1
        waiting[name] = retry = capacities.retry(
            name, data.draw(st.sampled_from(sorted(capacities.free))), release
        )
        queue.hold(retry)

    def drop() -> None:
        nonlocal num_dropped
        if waiting:
            name = data.draw(st.sampled_from(sorted(waiting)))
            num_dropped += queue.drop(waiting.pop(name))

    for index in range(data.draw(st.integers(1, 12))):
        hold(f"r{index}")
        action = data.draw(st.integers(0, 3))
        if action == 0:
            drop()
        elif action == 1:
            capacities.free[data.draw(st.sampled_from(sorted(capacities.free)))] += 1
            queue.pump()
        elif action == 2:
            queue.leave(data.draw(st.sampled_from(sorted(capacities.free))))
            rerouted, capacities.rerouted = capacities.rerouted, []
            num_held -= len(rerouted)
            for name in rerouted:
                hold(name)
    assert len(queue) == len(waiting)
    assert num_held == num_released + num_dropped + len(waiting)
    assert all(not capacities.has_capacity(name) for name in waiting) or sum(capacities.free.values()) > 0
    for name in capacities.free:
        queue.leave(name)


def test_the_next_end_is_expected_by_those_before() -> None:
    ends = EndRate(0.0)
    for index in range(1, 21):
        ends.add(0.5 * index)
    assert ends.next_s(10.0) == pytest.approx(0.5)
    assert ends.next_s(12.0) == pytest.approx(2.0), "what has run for long may run for as long again"
    assert ends.next_s(1000.0) == 10.0
    assert EndRate(5.0).next_s(5.0) == 0.0
