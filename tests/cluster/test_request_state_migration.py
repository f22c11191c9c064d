"""A stream that moves from a decode replica that leaves to another one, within its attempt."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from request_state_harness import (
    D0,
    D1,
    P0,
    P1,
    delta,
    handed_over,
    ids_of,
    make_journey,
    prefilled,
    route,
    truth,
)

from cluster.gateway.actions import (
    Action,
    CancelAt,
    Emit,
    Finish,
    MoveAt,
    NotePrefilled,
    Release,
    Route,
    RouteMove,
    Submit,
)
from cluster.gateway.migration import OVERDUE_S
from cluster.gateway.request_state import RequestState
from kvtransfer.messages import ReplicaIdentity
from workers.messages import HandOverTarget, Move, MoveEnded, RequestFailed

D2 = ReplicaIdentity("d2", 1)
ADDRESS = HandOverTarget(D1, "b")


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def decoding(max_tokens: int = 9, n: int = 1) -> RequestState:
    """It decodes at d0, and two tokens of each sample are here."""
    journey = make_journey(n=n, max_tokens=max_tokens)
    journey.start(0.0)
    route(journey, P0, D0)
    journey.on_prefilled(prefilled(), 1.0)
    for sample in range(n):
        journey.on_delta(P0, delta(sample, 0, 1, max_tokens), 1.0)
    journey.on_handed_over(D0, handed_over(), 1.0)
    for sample in range(n):
        journey.on_delta(D0, delta(sample, 1, 1, max_tokens), 2.0)
    return journey


def moving(max_tokens: int = 9) -> RequestState:
    """It decodes at d0, and is on its way to d1."""
    journey = decoding(max_tokens)
    assert journey.on_streams(D0, may_stay=False) == [RouteMove()]
    request = journey.move_request()
    assert request is not None
    assert (request.excluded, request.num_tokens, request.max_new_tokens) == (("d0",), 5, max_tokens - 2)
    (order,) = journey.on_move_routed(ADDRESS, 3.0)
    assert order == MoveAt(D0, Move("r", 1, ADDRESS))
    return journey


def emitted(actions: list[Action]) -> list[int]:
    return [token for action in actions if isinstance(action, Emit) for token in ids_of(action.tokens)]


@pytest.mark.parametrize("source_first", [True, False])
def test_a_move_is_one_attempt_whoever_tells_of_it_first(source_first: bool) -> None:
    journey = moving()
    assert emitted(journey.on_delta(D0, delta(0, 2, 2, 9), 4.0)) == truth(0, 4)[2:]
    ended, report = MoveEnded("r", 1, D1), replace(handed_over(), first_index=4)
    first = journey.on_move_ended(D0, ended, 5.0) if source_first else journey.on_handed_over(D1, report, 5.0)
    assert first == [NotePrefilled("r")]
    second = (
        journey.on_handed_over(D1, report, 5.0) if source_first else journey.on_move_ended(D0, ended, 5.0)
    )
    assert second == []
    assert emitted(journey.on_delta(D1, delta(0, 4, 4, 9), 6.0)) == truth(0, 8)[4:]
    assert journey.on_lost(D0, "it is gone", 7.0) == []
    *_, finish = journey.on_delta(D1, delta(0, 8, 1, 9), 8.0)
    assert isinstance(finish, Finish)
    summary = finish.summary
    assert (summary.num_attempts, summary.num_moves) == (1, 1)
    assert (summary.prefill_replica, summary.decode_replica) == ("p0", "d1")
    assert summary.hand_over == handed_over(), "the transfer that is told is the first one"
    assert [entry.name for entry in journey.timeline][-4:-2] == ["moving", "moved"]


def test_tokens_of_the_new_replica_wait_for_those_of_the_old_one() -> None:
    journey = moving()
    journey.on_handed_over(D1, replace(handed_over(), first_index=4), 4.0)
    assert journey.on_delta(D1, delta(0, 4, 2, 9), 4.0) == []
    assert emitted(journey.on_delta(D0, delta(0, 2, 2, 9), 4.0)) == truth(0, 6)[2:]


def test_an_old_replica_that_dies_with_tokens_that_it_owes_means_a_new_attempt() -> None:
    journey = moving()
    journey.on_handed_over(D1, replace(handed_over(), first_index=4), 4.0)
    journey.on_delta(D0, delta(0, 2, 1, 9), 4.0)
    assert kinds(journey.on_lost(D0, "reset", 5.0)) == ["CancelAt", "CancelAt", "Release", "Route"]
    (submit,) = route(journey, None, D1)
    assert isinstance(submit, Submit)
    assert ids_of(submit.submission.samples[0].output) == truth(0, 3)


def test_a_target_that_dies_is_missed_only_if_it_had_the_stream() -> None:
    for has_stream in (False, True):
        journey = moving()
        assert journey.on_lost(D1, "reset", 4.0) == [RouteMove(OVERDUE_S)]
        error = "" if has_stream else "the way was lost"
        actions = journey.on_move_ended(D0, MoveEnded("r", 1, D1, error), 5.0)
        if has_stream:
            assert kinds(actions) == ["CancelAt", "Release", "Route"]
            assert isinstance(actions[0], CancelAt)
            assert actions[0].replica == P0
        else:
            assert kinds(actions) == ["Release", "RouteMove"]
            assert emitted(journey.on_delta(D0, delta(0, 2, 1, 9), 6.0)) == truth(0, 3)[2:]


def test_a_target_that_is_lost_is_not_waited_for_without_end() -> None:
    """Its old replica may hang in the move as well."""
    journey = moving()
    journey.on_lost(D1, "reset", 4.0)
    assert journey.on_move_time(4.0 + OVERDUE_S - 0.1) == []
    actions = journey.on_move_time(4.0 + OVERDUE_S)
    assert kinds(actions) == ["CancelAt", "CancelAt", "Release", "Route"]
    assert journey.on_move_time(100.0) == []
    told = moving()
    told.on_lost(D1, "reset", 4.0)
    told.on_move_ended(D0, MoveEnded("r", 1, D1, "the way was lost"), 5.0)
    assert told.on_move_time(100.0) == []


def test_after_a_move_that_failed_another_target_is_asked_for() -> None:
    journey = moving()
    release, again = journey.on_move_ended(D0, MoveEnded("r", 1, D1, "no room"), 4.0)
    assert release == Release("r")
    assert isinstance(again, RouteMove)
    assert again.delay_s > 0
    request = journey.move_request()
    assert request is not None
    assert request.excluded == ("d0", "d1")
    (retry,) = journey.on_move_routed(None, 5.0)
    assert isinstance(retry, RouteMove)
    request = journey.move_request()
    assert request is not None
    assert request.excluded == ("d0",), "without another one, all are tried again"
    (order,) = journey.on_move_routed(ADDRESS, 6.0)
    assert isinstance(order, MoveAt)


def test_what_a_replica_says_after_the_stream_has_left_it_is_old() -> None:
    journey = moving()
    journey.on_handed_over(D1, replace(handed_over(), first_index=2), 4.0)
    lost = RequestFailed("r", 1, "leaving", "the way to d1 was lost with its state on it")
    assert journey.on_failed(D0, lost, 5.0) == []


def test_a_source_that_dies_means_a_new_attempt_and_stops_the_target_too() -> None:
    journey = moving()
    actions = journey.on_lost(D0, "reset", 4.0)
    assert [it.replica for it in actions if isinstance(it, CancelAt)] == [P0, D1]
    assert kinds(actions)[-2:] == ["Release", "Route"]
    route(journey, None, D2)
    assert journey.on_handed_over(D1, handed_over(), 5.0) == []  # of the attempt before


def test_there_and_back() -> None:
    journey = moving()
    assert journey.on_move_ended(D0, MoveEnded("r", 1, D1), 4.0) == [NotePrefilled("r")]
    journey.on_streams(D0, may_stay=True)
    assert journey.on_streams(D1, may_stay=False) == [RouteMove()]
    assert journey.move_request() is not None
    back = HandOverTarget(D0, "a")
    assert journey.on_move_routed(back, 5.0) == [MoveAt(D1, Move("r", 1, back))]
    assert journey.on_handed_over(D0, replace(handed_over(), first_index=2), 6.0) == [NotePrefilled("r")]
    assert emitted(journey.on_delta(D0, delta(0, 2, 1, 9), 7.0)) == truth(0, 3)[2:]
    assert kinds(journey.on_lost(D0, "reset", 8.0)) == ["CancelAt", "Release", "Route"]


def test_a_hand_over_to_a_replica_that_leaves_ends_there_and_moves_on() -> None:
    journey = make_journey(max_tokens=9)
    journey.start(0.0)
    route(journey, P0, D0)
    assert journey.on_streams(D0, may_stay=False) == [], "its prompt is being computed"
    journey.on_delta(P0, delta(0, 0, 1, 9), 1.0)
    assert journey.on_handed_over(D0, handed_over(), 2.0) == [RouteMove()]


def test_a_prompt_that_a_leaving_replica_computes_for_itself_moves_when_it_is_done() -> None:
    journey = make_journey(max_tokens=9)
    journey.start(0.0)
    route(journey, None, D0)
    assert journey.on_streams(D0, may_stay=False) == []
    assert journey.on_prefilled(prefilled(), 2.0) == [NotePrefilled("r"), RouteMove()]


def test_samples_of_one_request_stay_together() -> None:
    journey = decoding(n=2)
    assert journey.on_streams(D0, may_stay=False) == []
    assert journey.move_request() is None


def test_a_replica_that_may_keep_its_streams_after_all_keeps_them() -> None:
    journey = decoding()
    assert journey.on_streams(D0, may_stay=False) == [RouteMove()]
    journey.on_streams(D0, may_stay=True)
    assert journey.move_request() is None
    assert journey.on_streams(D0, may_stay=False) == [RouteMove()]


def test_what_a_leaving_replica_hands_back_costs_no_attempt_but_once() -> None:
    journey = make_journey(max_attempts=1)
    journey.start(0.0)
    route(journey, P0, D0)
    *_, again = journey.on_failed(P0, RequestFailed("r", 1, "leaving", "it leaves"), 1.0)
    assert isinstance(again, Route)
    assert (again.request.excluded, again.delay_s) == (("p0",), 0.0)
    route(journey, P1, D0)
    *_, again = journey.on_failed(P1, RequestFailed("r", 2, "leaving", "it leaves"), 1.0)
    assert isinstance(again, Route)
    assert again.delay_s == 0.0
    route(journey, P1, D0)
    assert kinds(journey.on_failed(P1, RequestFailed("r", 3, "leaving", "again"), 1.0))[-1] == "Fail"


@pytest.mark.parametrize("code", ["refused", "peer"])
def test_a_leaving_decode_replica_that_takes_nothing_costs_no_attempt(code: str) -> None:
    journey = make_journey(max_attempts=1)
    journey.start(0.0)
    route(journey, P0, D0)
    journey.on_streams(D0, may_stay=False)
    *_, again = journey.on_failed(P0, RequestFailed("r", 1, code, "it leaves", 0.5, "d0"), 1.0)
    assert isinstance(again, Route)
    assert (again.request.excluded, again.delay_s) == (("d0",), 0.0)
