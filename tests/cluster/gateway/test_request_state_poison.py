"""A request under which replicas break: when it is the cause, and what its neighbours pay for it."""

from __future__ import annotations

import pytest
from request_state_harness import (
    D0,
    D1,
    P0,
    P1,
    Effect,
    Fail,
    RecordedRequest,
    Route,
    Submit,
    delta,
    handed_over,
    make_request,
    route,
)

from cluster.errors import PoisonRequestError, UnavailableError, to_grpc_status
from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import IsolationReport, RequestFailed


def broke(number: int, reason: str = "a kernel broke", *, suspect: bool = True) -> RequestFailed:
    return RequestFailed("r", number, "internal", reason, suspect=suspect)


def started(max_attempts: int = 5) -> RecordedRequest:
    request = make_request(max_attempts=max_attempts)
    request.start(0.0)
    return request


def is_suspect(effects: list[Effect]) -> bool:
    (submit,) = effects
    assert isinstance(submit, Submit)
    return submit.submission.suspect


def poison(effects: list[Effect]) -> str:
    fail = effects[-1]
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, PoisonRequestError)
    assert to_grpc_status(fail.error).code.name == "INTERNAL"
    return str(fail.error)


def goes_on(effects: list[Effect]) -> bool:
    return isinstance(effects[-1], Route)


def alone(
    request: RecordedRequest, replica: ReplicaIdentity, number: int, *, is_cleared: bool = False
) -> None:
    assert request.on_isolated(replica, IsolationReport("r", number, is_cleared), 1.0) == []


def test_the_second_replica_that_breaks_ends_the_request_and_both_are_named() -> None:
    request = started()
    assert not is_suspect(route(request, P0, D0))
    assert goes_on(request.on_failed(P0, broke(1), 1.0))
    assert is_suspect(route(request, P1, D0))
    reason = poison(request.on_failed(P1, broke(2, "another one"), 2.0))
    assert "p0: a kernel broke; then p1: another one" in reason
    assert request.on_no_route("late", 1.0, 3.0) == []


def test_it_may_be_the_prefill_replica_of_one_attempt_and_the_decode_replica_of_the_next() -> None:
    request = started()
    route(request, P0, D0)
    assert goes_on(request.on_failed(P0, broke(1), 1.0))
    route(request, P1, D0)
    request.on_delta(P1, delta(0, 0, 1, 6, attempt=2), 1.0)
    request.on_handed_over(D0, handed_over(2), 1.0)
    alone(request, D0, 2)
    assert "p0: a kernel broke; then d0 lost: reset" in poison(request.on_lost(D0, "reset", 2.0))


def test_replicas_that_break_under_others_cost_no_attempt() -> None:
    request = started(max_attempts=3)
    for number, replica in enumerate((P0, P1, D0), 1):
        assert not is_suspect(route(request, replica, D1))
        assert goes_on(request.on_failed(replica, broke(number, suspect=False), 1.0))
    for number in (4, 5, 6):  # one that lives on, and breaks again and again, is no accident
        route(request, P0, D1)
        fail = request.on_failed(P0, broke(number, suspect=False), 1.0)[-1]
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, UnavailableError)


def test_what_breaks_under_others_is_bounded_all_the_same() -> None:
    request, number = started(max_attempts=2), 0
    while True:
        number += 1
        replica = ReplicaIdentity("p0", number)
        route(request, replica, D0)
        if not goes_on(request.on_failed(replica, broke(number, suspect=False), 1.0)):
            break
    assert number == 2 + 2


def test_neighbours_of_a_poison_use_up_no_attempt() -> None:
    """One in the batch that broke first, which then waits at the second replica."""
    request = started(max_attempts=1)
    route(request, P0, D0)
    assert goes_on(request.on_failed(P0, broke(1), 1.0))
    assert is_suspect(route(request, P1, D0))
    assert goes_on(request.on_failed(P1, broke(2, suspect=False), 1.0))
    assert is_suspect(route(request, None, D0)), "it still has to prove itself"
    assert goes_on(request.on_failed(D0, RequestFailed("r", 3, "leaving", "it leaves"), 1.0))


def test_a_suspect_that_waits_for_its_turn_is_not_to_blame_for_a_lost_replica() -> None:
    request = started()
    route(request, None, D0)
    assert goes_on(request.on_lost(D0, "reset", 1.0))
    assert is_suspect(route(request, None, D1))
    assert goes_on(request.on_lost(D1, "reset", 1.0))
    assert is_suspect(route(request, None, D0))
    alone(request, D0, 3)
    assert "d0 lost: reset; then d0 lost: again" in poison(request.on_lost(D0, "again", 2.0))


def test_a_cleared_suspect_starts_anew() -> None:
    request = started()
    route(request, None, D0)
    assert goes_on(request.on_lost(D0, "reset", 1.0))
    route(request, None, D1)
    alone(request, D1, 2)
    alone(request, D1, 2, is_cleared=True)
    assert goes_on(request.on_lost(D1, "reset", 1.0)), "it ran with others again"
    assert is_suspect(route(request, None, D0))


def test_a_request_that_is_cleared_each_time_breaks_no_more_replicas_than_it_has_attempts() -> None:
    request = started(max_attempts=3)
    for number in (1, 2):
        replica = ReplicaIdentity("d0", number)
        route(request, None, replica)
        alone(request, replica, number, is_cleared=True)
        assert goes_on(request.on_failed(replica, broke(number), 1.0))
    last = ReplicaIdentity("d0", 3)
    route(request, None, last)
    alone(request, last, 3, is_cleared=True)
    poison(request.on_failed(last, broke(3), 1.0))


def test_samples_that_are_submitted_apart_are_all_to_be_cleared() -> None:
    request = make_request(n=2)
    request.start(0.0)
    route(request, None, D0)
    request.on_delta(D0, delta(0, 0, 1, 6), 1.0)
    request.on_lost(D0, "reset", 1.0)
    assert [it.submission.suspect for it in route(request, None, D1) if isinstance(it, Submit)] == [True] * 2
    alone(request, D1, 2)
    alone(request, D1, 2, is_cleared=True)
    assert goes_on(request.on_lost(D1, "reset", 1.0)), "the other one has not begun"
    route(request, None, D0)
    for number in (4, 5):
        alone(request, D0, number)
        alone(request, D0, number, is_cleared=True)
    assert goes_on(request.on_lost(D0, "reset", 1.0))


@pytest.mark.parametrize("what", ["leaving", "not handed over", "unsent", "stale"])
def test_what_raises_no_suspicion(what: str) -> None:
    request = started(max_attempts=1)
    route(request, P0, D0)
    if what == "leaving":
        request.on_streams(D0, False, 2.0)
        request.on_delta(P0, delta(0, 0, 1, 6), 1.0)
        request.on_handed_over(D0, handed_over(), 1.0)
        effects = request.on_lost(D0, "it has left", 1.0)
    elif what == "not handed over":
        effects = request.on_lost(D0, "reset", 1.0)
    elif what == "unsent":
        effects = request.on_unsent(P0, 1.0)
    else:
        assert request.on_failed(P0, broke(7), 1.0) == []
        effects = request.on_failed(P0, broke(1, suspect=False), 1.0)
    assert goes_on(effects)
    assert not is_suspect(route(request, P1, D1))


def test_a_peer_that_breaks_costs_its_writers_no_attempt_the_first_time() -> None:
    request = started(max_attempts=2)
    for number, decode in enumerate((D0, D1, D0), 1):
        route(request, P0, decode)
        assert goes_on(request.on_failed(P0, RequestFailed("r", number, "peer", "link closed"), 1.0))
    route(request, P0, D0)
    assert isinstance(request.on_failed(P0, RequestFailed("r", 4, "peer", "link closed"), 1.0)[-1], Fail)
