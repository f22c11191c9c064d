"""A stream that moves from a decode replica that leaves to another one, within its attempt."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from request_state_harness import (
    D0,
    D1,
    P0,
    P1,
    CancelAt,
    Confirm,
    Effect,
    Finish,
    MoveAt,
    RecordedRequest,
    Release,
    Route,
    RouteMove,
    ScheduleMove,
    Submit,
    delta,
    handed_over,
    ids_of,
    kinds,
    make_request,
    prefilled,
    route,
    truth,
)

from cluster.gateway.sample_output import OutputDelta
from cluster.gateway.stream_migration import OVERDUE_S
from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import HandOverTarget, Move, MoveEnded, RequestFailed

D2 = ReplicaIdentity("d2", 1)
ADDRESS = HandOverTarget(D1, "b")


def decoding(max_tokens: int = 9, n: int = 1) -> RecordedRequest:
    """It decodes at d0, and two tokens of each sample are here."""
    request = make_request(n=n, max_tokens=max_tokens)
    request.start(0.0)
    route(request, P0, D0)
    request.on_prefilled(prefilled(), 1.0)
    for sample in range(n):
        request.on_delta(P0, delta(sample, 0, 1, max_tokens), 1.0)
    request.on_handed_over(D0, handed_over(), 1.0)
    for sample in range(n):
        request.on_delta(D0, delta(sample, 1, 1, max_tokens), 2.0)
    return request


def in_migration(max_tokens: int = 9) -> RecordedRequest:
    """It decodes at d0, and is on its way to d1."""
    request = decoding(max_tokens)
    assert request.on_streams(D0, False, 2.0) == [ScheduleMove()]
    (find,) = request.on_move_time(2.0)
    assert isinstance(find, RouteMove)
    wanted = find.request
    assert (wanted.excluded, wanted.num_tokens, wanted.max_new_tokens) == (("d0",), 5, max_tokens - 2)
    (order,) = request.on_move_routed(ADDRESS, 3.0)
    assert order == MoveAt(D0, Move("r", 1, ADDRESS))
    return request


def emitted(effects: list[Effect]) -> list[int]:
    return [token for action in effects if isinstance(action, OutputDelta) for token in ids_of(action.tokens)]


@pytest.mark.parametrize("source_first", [True, False])
def test_a_move_is_one_attempt_whoever_tells_of_it_first(source_first: bool) -> None:
    request = in_migration()
    assert emitted(request.on_delta(D0, delta(0, 2, 2, 9), 4.0)) == truth(0, 4)[2:]
    ended, report = MoveEnded("r", 1, D1), replace(handed_over(), first_index=4)
    first = request.on_move_ended(D0, ended, 5.0) if source_first else request.on_handed_over(D1, report, 5.0)
    assert first == [Confirm()]
    second = (
        request.on_handed_over(D1, report, 5.0) if source_first else request.on_move_ended(D0, ended, 5.0)
    )
    assert second == []
    assert emitted(request.on_delta(D1, delta(0, 4, 4, 9), 6.0)) == truth(0, 8)[4:]
    assert request.on_lost(D0, "it is gone", 7.0) == []
    *_, finish = request.on_delta(D1, delta(0, 8, 1, 9), 8.0)
    assert isinstance(finish, Finish)
    summary = finish.summary
    assert (summary.num_attempts, summary.num_moves) == (1, 1)
    assert (summary.prefill_replica, summary.decode_replica) == ("p0", "d1")
    assert summary.hand_over == handed_over(), "the transfer that is told is the first one"
    assert [entry.name for entry in request.timeline][-4:-2] == ["moving", "moved"]


def test_tokens_of_the_new_replica_wait_for_those_of_the_old_one() -> None:
    request = in_migration()
    request.on_handed_over(D1, replace(handed_over(), first_index=4), 4.0)
    assert request.on_delta(D1, delta(0, 4, 2, 9), 4.0) == []
    assert emitted(request.on_delta(D0, delta(0, 2, 2, 9), 4.0)) == truth(0, 6)[2:]


def test_an_old_replica_that_dies_with_tokens_that_it_owes_means_a_new_attempt() -> None:
    request = in_migration()
    request.on_handed_over(D1, replace(handed_over(), first_index=4), 4.0)
    request.on_delta(D0, delta(0, 2, 1, 9), 4.0)
    assert kinds(request.on_lost(D0, "reset", 5.0)) == ["CancelAt", "CancelAt", "Release", "Route"]
    (submit,) = route(request, None, D1)
    assert isinstance(submit, Submit)
    assert ids_of(submit.submission.samples[0].output) == truth(0, 3)


def test_a_target_that_dies_is_missed_only_if_it_had_the_stream() -> None:
    for has_stream in (False, True):
        request = in_migration()
        assert request.on_lost(D1, "reset", 4.0) == [ScheduleMove(OVERDUE_S)]
        error = "" if has_stream else "the way was lost"
        effects = request.on_move_ended(D0, MoveEnded("r", 1, D1, error), 5.0)
        if has_stream:
            assert kinds(effects) == ["CancelAt", "Release", "Route"]
            assert isinstance(effects[0], CancelAt)
            assert effects[0].replica == P0
        else:
            assert kinds(effects) == ["Release", "ScheduleMove"]
            assert emitted(request.on_delta(D0, delta(0, 2, 1, 9), 6.0)) == truth(0, 3)[2:]


def test_a_target_that_is_lost_is_not_waited_for_without_end() -> None:
    """Its old replica may hang in the move as well."""
    request = in_migration()
    request.on_lost(D1, "reset", 4.0)
    assert request.on_move_time(4.0 + OVERDUE_S - 0.1) == []
    effects = request.on_move_time(4.0 + OVERDUE_S)
    assert kinds(effects) == ["CancelAt", "CancelAt", "Release", "Route"]
    assert request.on_move_time(100.0) == []
    reported = in_migration()
    reported.on_lost(D1, "reset", 4.0)
    reported.on_move_ended(D0, MoveEnded("r", 1, D1, "the way was lost"), 5.0)
    assert kinds(reported.on_move_time(100.0)) == ["RouteMove"], "nothing but another target is asked for"


def test_after_a_move_that_failed_another_target_is_asked_for() -> None:
    request = in_migration()
    release, again = request.on_move_ended(D0, MoveEnded("r", 1, D1, "no free blocks"), 4.0)
    assert release == Release()
    assert isinstance(again, ScheduleMove)
    assert again.delay_s > 0
    (find,) = request.on_move_time(4.5)
    assert isinstance(find, RouteMove)
    assert find.request.excluded == ("d0", "d1")
    (retry,) = request.on_move_routed(None, 5.0)
    assert isinstance(retry, ScheduleMove)
    (find,) = request.on_move_time(5.0)
    assert isinstance(find, RouteMove)
    assert find.request.excluded == ("d0",), "without another one, all are tried again"
    (order,) = request.on_move_routed(ADDRESS, 6.0)
    assert isinstance(order, MoveAt)


def test_what_a_replica_says_after_the_stream_has_left_it_is_old() -> None:
    request = in_migration()
    request.on_handed_over(D1, replace(handed_over(), first_index=2), 4.0)
    lost = RequestFailed("r", 1, "leaving", "the way to d1 was lost with its state on it")
    assert request.on_failed(D0, lost, 5.0) == []


def test_a_source_that_dies_means_a_new_attempt_and_stops_the_target_too() -> None:
    request = in_migration()
    effects = request.on_lost(D0, "reset", 4.0)
    assert [it.replica for it in effects if isinstance(it, CancelAt)] == [P0, D1]
    assert kinds(effects)[-2:] == ["Release", "Route"]
    route(request, None, D2)
    assert request.on_handed_over(D1, handed_over(), 5.0) == []  # of the attempt before


def test_there_and_back() -> None:
    request = in_migration()
    assert request.on_move_ended(D0, MoveEnded("r", 1, D1), 4.0) == [Confirm()]
    request.on_streams(D0, True, 2.0)
    assert request.on_streams(D1, False, 2.0) == [ScheduleMove()]
    assert kinds(request.on_move_time(4.5)) == ["RouteMove"]
    back = HandOverTarget(D0, "a")
    assert request.on_move_routed(back, 5.0) == [MoveAt(D1, Move("r", 1, back))]
    assert request.on_handed_over(D0, replace(handed_over(), first_index=2), 6.0) == [Confirm()]
    assert emitted(request.on_delta(D0, delta(0, 2, 1, 9), 7.0)) == truth(0, 3)[2:]
    assert kinds(request.on_lost(D0, "reset", 8.0)) == ["CancelAt", "Release", "Route"]


def test_a_hand_over_to_a_replica_that_leaves_ends_there_and_moves_on() -> None:
    request = make_request(max_tokens=9)
    request.start(0.0)
    route(request, P0, D0)
    assert request.on_streams(D0, False, 2.0) == [], "its prompt is being computed"
    request.on_delta(P0, delta(0, 0, 1, 9), 1.0)
    assert request.on_handed_over(D0, handed_over(), 2.0) == [ScheduleMove()]


def test_a_prompt_that_a_leaving_replica_computes_for_itself_moves_when_it_is_done() -> None:
    request = make_request(max_tokens=9)
    request.start(0.0)
    route(request, None, D0)
    assert request.on_streams(D0, False, 2.0) == []
    assert request.on_prefilled(prefilled(), 2.0) == [Confirm(), ScheduleMove()]


def test_samples_of_one_request_stay_together() -> None:
    request = decoding(n=2)
    assert request.on_streams(D0, False, 2.0) == []
    assert request.on_move_time(3.0) == []


def test_a_replica_that_may_keep_its_streams_after_all_keeps_them() -> None:
    request = decoding()
    assert request.on_streams(D0, False, 2.0) == [ScheduleMove()]
    request.on_streams(D0, True, 2.0)
    assert request.on_move_time(3.0) == []
    assert request.on_streams(D0, False, 2.0) == [ScheduleMove()]


def test_what_a_leaving_replica_returns_costs_no_attempt_but_once() -> None:
    request = make_request(max_attempts=1)
    request.start(0.0)
    route(request, P0, D0)
    *_, again = request.on_failed(P0, RequestFailed("r", 1, "leaving", "it leaves"), 1.0)
    assert isinstance(again, Route)
    assert (again.request.excluded, again.delay_s) == (("p0",), 0.0)
    route(request, P1, D0)
    *_, again = request.on_failed(P1, RequestFailed("r", 2, "leaving", "it leaves"), 1.0)
    assert isinstance(again, Route)
    assert again.delay_s == 0.0
    route(request, P1, D0)
    assert kinds(request.on_failed(P1, RequestFailed("r", 3, "leaving", "again"), 1.0))[-1] == "Fail"


@pytest.mark.parametrize("code", ["refused", "peer"])
def test_a_leaving_decode_replica_that_takes_nothing_costs_no_attempt(code: str) -> None:
    request = make_request(max_attempts=1)
    request.start(0.0)
    route(request, P0, D0)
    request.on_streams(D0, False, 2.0)
    *_, again = request.on_failed(P0, RequestFailed("r", 1, code, "it leaves", 0.5, "d0"), 1.0)
    assert isinstance(again, Route)
    assert (again.request.excluded, again.delay_s) == (("d0",), 0.0)
