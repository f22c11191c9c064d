"""A request and a replica that stands still: what leaves it, when, and what that counts."""

from __future__ import annotations

import pytest
from request_state_harness import (
    D0,
    D1,
    P0,
    P1,
    CancelAt,
    Effect,
    Fail,
    Finish,
    RecordedRequest,
    Route,
    Submit,
    delta,
    handed_over,
    kinds,
    make_request,
    prefilled,
    route,
)

from cluster.errors import PoisonRequestError
from cluster.gateway.request_state import RequestPhase
from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import IsolationReport, RequestFailed, StallReport, Submission

WHY = "nothing was heard"


def running(prefill: ReplicaIdentity | None = P0, decode: ReplicaIdentity = D0) -> RecordedRequest:
    request = make_request()
    request.start(0.0)
    route(request, prefill, decode)
    return request


def test_without_a_token_it_is_placed_again_at_once_wherever_it_is_missed() -> None:
    for stopped in (P0, D0):
        request = running()
        effects = request.on_stopped(stopped, WHY, False, 2.0)
        assert kinds(effects) == ["CancelAt", "CancelAt", "Release", "Route"]
        cancels = [it.replica for it in effects if isinstance(it, CancelAt)]
        assert cancels == [P0, D0], "the stopped one too, for when it continues"
        again = effects[-1]
        assert isinstance(again, Route)
        assert again.delay_s == 0
        assert again.request.excluded == (stopped.replica_id,)
        assert "stands still" in request.timeline[-1].detail


def test_late_tokens_of_what_was_left_are_ignored() -> None:
    request = running(None)
    request.on_stopped(D0, WHY, False, 2.0)
    assert request.on_delta(D0, delta(0, 0, 1, 6), 3.0) == []
    route(request, None, D1)
    assert request.on_delta(D0, delta(0, 0, 1, 6), 3.0) == []
    assert request.on_stopped(D0, WHY, True, 3.0) == []
    assert kinds(request.on_delta(D1, delta(0, 0, 6, 6, attempt=2), 3.0)) == [
        "OutputDelta",
        "Release",
        "Finish",
    ]


def test_a_stream_stays_until_it_is_certain() -> None:
    request = running(None)
    request.on_prefilled(prefilled(), 1.0)
    request.on_delta(D0, delta(0, 0, 2, 6), 1.0)
    assert request.on_stopped(D0, WHY, False, 2.0) == []
    effects = request.on_stopped(D0, WHY, True, 3.0)
    assert kinds(effects) == ["CancelAt", "Release", "Route"]
    route(request, None, D1)
    assert kinds(request.on_delta(D1, delta(0, 2, 4, 6, attempt=2), 3.0))[-1] == "Finish"


def test_a_resumed_attempt_without_a_token_of_its_own_does_not_wait() -> None:
    request = running(None)
    request.on_delta(D0, delta(0, 0, 2, 6), 1.0)
    request.on_stopped(D0, WHY, True, 2.0)
    route(request, None, D1)
    assert kinds(request.on_stopped(D1, WHY, False, 3.0))[-1] == "Route"


def test_a_prefill_replica_that_has_done_its_part_is_not_missed() -> None:
    request = running()
    request.on_prefilled(prefilled(), 1.0)
    request.on_delta(P0, delta(0, 0, 1, 6), 1.0)
    request.on_handed_over(D0, handed_over(), 1.0)
    assert request.on_stopped(P0, WHY, True, 2.0) == []
    assert request.phase is RequestPhase.RUNNING


def test_it_is_nobodys_fault_and_counts_as_no_attempt() -> None:
    request = make_request(max_attempts=2)
    request.start(0.0)
    route(request, None, D0)
    assert kinds(request.on_stopped(D0, WHY, False, 1.0))[-1] == "Route"
    route(request, None, D1)
    assert kinds(request.on_stopped(D1, WHY, False, 1.0))[-1] == "Route"
    assert request.phase is RequestPhase.ROUTING


def test_where_nothing_else_takes_it_the_request_waits() -> None:
    request = running(None)
    request.on_stopped(D0, WHY, False, 1.0)
    route(request, None, D0)
    assert request.on_stopped(D0, WHY, True, 2.0) == []
    assert request.phase is RequestPhase.RUNNING


def test_a_request_under_which_one_replica_after_another_stops_runs_alone_and_is_ended() -> None:
    request = running(None)
    request.on_stopped(D0, WHY, False, 1.0)
    assert not submitted(route(request, None, D1)).suspect
    request.on_stopped(D1, WHY, False, 2.0)
    assert submitted(route(request, None, P0)).suspect
    request.on_isolated(P0, IsolationReport("r", 3, False), 2.0)
    effects = request.on_stopped(P0, WHY, False, 3.0)
    assert kinds(effects)[-1] == "Fail"


def test_a_request_of_the_step_that_stands_still_runs_alone_at_once_and_the_second_replica_ends_it() -> None:
    request = running()
    stalled(request, P0, 1)
    request.on_stopped(P0, WHY, False, 1.0)
    assert submitted(route(request, P1, D0)).suspect
    request.on_isolated(P1, IsolationReport("r", 2, False), 1.0)
    stalled(request, P1, 2)
    last = request.on_stopped(P1, "again", False, 2.0)[-1]
    assert isinstance(last, Fail)
    assert isinstance(last.error, PoisonRequestError)
    assert "p0 stands still: nothing was heard; then p1 stands still: again" in str(last.error)


@pytest.mark.parametrize("in_step", [True, False])
def test_a_neighbor_of_what_makes_replicas_stand_still_needs_three_attempts(in_step: bool) -> None:
    """It shares the step that hangs, or waits, and then waits behind the culprit, which runs alone."""
    request = make_request(max_attempts=1)
    request.start(0.0)
    route(request, P0, D0)
    if in_step:
        stalled(request, P0, 1)
    request.on_stopped(P0, WHY, False, 1.0)
    assert submitted(route(request, P1, D0)).suspect == in_step
    assert kinds(request.on_stopped(P1, WHY, False, 2.0))[-1] == "Route"
    route(request, None, D0)
    last = request.on_delta(D0, delta(0, 0, 6, 6, attempt=3), 3.0)[-1]
    assert isinstance(last, Finish)
    assert last.summary.num_attempts == 3


def test_what_is_said_of_another_attempt_raises_no_suspicion() -> None:
    request = running(None)
    stalled(request, D0, 1)
    request.on_failed(D0, RequestFailed("r", 1, "peer", "away"), 1.0)
    route(request, None, D1)
    stalled(request, D1, 1)
    request.on_stopped(D1, WHY, False, 2.0)
    assert not submitted(route(request, None, D0)).suspect


def test_a_suspect_that_had_not_begun_is_forgiven() -> None:
    request = running(None)
    request.on_stopped(D0, WHY, False, 1.0)
    route(request, None, D1)
    request.on_stopped(D1, WHY, False, 2.0)
    route(request, None, P0)
    assert kinds(request.on_stopped(P0, WHY, False, 3.0))[-1] == "Route"
    assert submitted(route(request, None, P1)).suspect


def stalled(request: RecordedRequest, replica: ReplicaIdentity, number: int) -> None:
    assert request.on_stalled(replica, StallReport("r", number), 1.0) == []


def submitted(effects: list[Effect]) -> Submission:
    last = effects[-1]
    assert isinstance(last, Submit)
    return last.submission
