"""Requests that a replica has refused, and when refused clients may come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.admission.end_rate import EndRate
from cluster.admission.flow import Flow
from cluster.admission.queued_request import QueuedRequest
from cluster.admission.retry_queue import RetryQueue
from router.messages import Decision


class Capacities:
    """Replicas that have capacity for so many more requests each."""

    def __init__(self, **free: int) -> None:
        self.free = free
        self.placed: dict[str, str] = {}
        self.released: list[str] = []
        self.rerouted: list[str] = []
        self.queue = RetryQueue(self, self.release, lambda it: self.rerouted.append(it.request_id))

    def has_capacity(self, request_id: str) -> bool:
        return self.free[self.placed[request_id]] > 0

    def release(self, queued: QueuedRequest) -> None:
        self.released.append(queued.request_id)
        self.free[self.placed[queued.request_id]] -= 1

    def retry(self, request_id: str, replica_id: str) -> QueuedRequest:
        self.placed[request_id] = replica_id
        queued = QueuedRequest(request_id, Flow("", "standard"), 0.0)
        queued.decision = Decision(request_id, "cost", "", replica_id, 0, 0, (), "")
        return queued


def test_a_retry_goes_when_its_pair_has_capacity_the_first_refused_first() -> None:
    capacities = Capacities(d0=0, d1=1)
    for name, replica_id in (("a", "d0"), ("b", "d0"), ("c", "d1")):
        capacities.queue.put(capacities.retry(name, replica_id))
    assert capacities.released == ["c"]
    capacities.free["d0"] = 1
    capacities.queue.pump()
    assert capacities.released == ["c", "a"]
    capacities.free["d0"] = 1
    capacities.queue.pump()
    assert capacities.released == ["c", "a", "b"]
    assert len(capacities.queue) == 0


def test_who_ended_is_forgotten_and_who_waits_for_a_replica_that_goes_is_placed_once_more() -> None:
    capacities = Capacities(d0=0, d1=0)
    queue = capacities.queue
    retries = [capacities.retry(name, at) for name, at in (("a", "d0"), ("b", "d0"), ("c", "d1"))]
    for retry in retries:
        queue.put(retry)
    assert queue.drop(retries[0])
    assert not queue.drop(retries[0])
    queue.leave("d0")
    assert capacities.rerouted == ["b"]
    assert capacities.released == []
    assert len(queue) == 1


@given(st.data())
def test_every_retry_is_released_or_dropped_once_whatever_a_release_does(data: st.DataObject) -> None:
    """Also where a release puts the request back, or lets another end."""
    capacities = Capacities(d0=0, d1=0, d2=0)
    waiting: dict[str, QueuedRequest] = {}
    num_put = num_released = num_dropped = 0

    def release(queued: QueuedRequest) -> None:
        nonlocal num_released
        name = queued.request_id
        capacities.release(queued)
        assert waiting.pop(name) is queued
        num_released += 1
        if data.draw(st.integers(0, 3)) == 0 and num_put < 40:
            put(name)
        elif data.draw(st.booleans()):
            drop()

    queue = RetryQueue(capacities, release, lambda it: capacities.rerouted.append(it.request_id))

    def put(name: str) -> None:
        nonlocal num_put
        num_put += 1
        waiting[name] = retry = capacities.retry(name, data.draw(st.sampled_from(sorted(capacities.free))))
        queue.put(retry)

    def drop() -> None:
        nonlocal num_dropped
        if waiting:
            name = data.draw(st.sampled_from(sorted(waiting)))
            num_dropped += queue.drop(waiting.pop(name))

    for index in range(data.draw(st.integers(1, 12))):
        put(f"r{index}")
        action = data.draw(st.integers(0, 3))
        if action == 0:
            drop()
        elif action == 1:
            capacities.free[data.draw(st.sampled_from(sorted(capacities.free)))] += 1
            queue.pump()
        elif action == 2:
            queue.leave(data.draw(st.sampled_from(sorted(capacities.free))))
            rerouted, capacities.rerouted = capacities.rerouted, []
            num_put -= len(rerouted)
            for name in rerouted:
                put(name)
    assert len(queue) == len(waiting)
    assert num_put == num_released + num_dropped + len(waiting)
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
