"""The state machine of one request: what each event leads to."""

from __future__ import annotations

import pytest
from request_state_harness import (
    D0,
    D1,
    P0,
    P1,
    CancelAt,
    Confirm,
    Effect,
    Fail,
    Finish,
    Release,
    Route,
    Submit,
    delta,
    handed_over,
    ids_of,
    kinds,
    make_request,
    prefilled,
    raw,
    route,
    truth,
)

from cluster.errors import (
    AbandonedError,
    DeadlineError,
    GrammarError,
    InvalidRequestError,
    InvalidToolsError,
    OverloadedError,
    UnavailableError,
)
from cluster.gateway.request_state import MOST_RETURNS
from cluster.gateway.sample_output import OutputDelta
from cluster.text.preprocess import SampleStart, sample_seed
from workers.messages.link import HandOverTarget, RequestFailed, SampleState, Submission, TokenDelta


def submissions(effects: list[Effect]) -> list[Submission]:
    return [action.submission for action in effects if isinstance(action, Submit)]


def test_an_undisturbed_request() -> None:
    request = make_request(max_tokens=3)
    (first,) = request.start(0.0)
    assert isinstance(first, Route)
    assert (first.request.num_tokens, first.request.max_new_tokens, first.delay_s) == (3, 3, 0.0)
    (submit,) = route(request, P0, D0)
    assert isinstance(submit, Submit)
    assert (submit.replica, submit.submission.decode) == (P0, HandOverTarget(D0, "a"))
    assert submit.submission.samples == (SampleState(0, 5, b""),)
    assert request.on_prefilled(prefilled(), 2.0) == [Confirm()]
    assert kinds(request.on_delta(P0, delta(0, 0, 1, 3), 2.0)) == ["OutputDelta"]
    assert request.on_handed_over(D0, handed_over(), 2.1) == []
    assert kinds(request.on_delta(D0, delta(0, 1, 1, 3), 3.0)) == ["OutputDelta"]
    *_, finish = request.on_delta(D0, delta(0, 2, 1, 3), 4.0)
    assert isinstance(finish, Finish)
    summary = finish.summary
    assert (summary.first_token_at, summary.finished_at, summary.num_attempts) == (2.0, 4.0, 1)
    assert (summary.prefill_replica, summary.decode_replica) == ("p0", "d0")
    assert [entry.name for entry in request.timeline] == [
        *("accepted", "routed", "prefilled", "first token", "handed over", "sample finished", "finished")
    ]


def test_without_a_prefill_replica_the_decode_replica_gets_all() -> None:
    request = make_request()
    request.start(0.0)
    (submit,) = route(request, None, D0)
    assert isinstance(submit, Submit)
    assert (submit.replica, submit.submission.decode) == (D0, None)


def test_early_deltas_wait_and_repeated_ones_are_dropped() -> None:
    request = make_request(max_tokens=6)
    request.start(0.0)
    route(request, P0, D0)
    assert request.on_delta(D0, delta(0, 3, 1, 6), 1.0) == []
    assert request.on_delta(D0, delta(0, 1, 2, 6), 1.0) == []
    emits = request.on_delta(P0, delta(0, 0, 1, 6), 1.0)
    assert [(it.first_index, ids_of(it.tokens)) for it in emits if isinstance(it, OutputDelta)] == [
        (0, truth(0, 1)),
        (1, truth(0, 3)[1:]),
        (3, truth(0, 4)[3:]),
    ]
    assert request.on_delta(P0, delta(0, 0, 2, 6), 1.0) == []
    (emit,) = request.on_delta(D0, delta(0, 2, 3, 6), 1.0)
    assert isinstance(emit, OutputDelta)
    assert (emit.first_index, ids_of(emit.tokens)) == (4, truth(0, 5)[4:])


def test_a_lost_decode_replica_means_a_new_attempt_with_what_is_there() -> None:
    request = make_request(n=3, max_tokens=4)
    request.start(0.0)
    route(request, P0, D0)
    request.on_delta(P0, delta(0, 0, 1, 4), 1.0)
    request.on_delta(P0, delta(1, 0, 4, 4), 1.0)
    effects = request.on_lost(D0, "reset", 2.0)
    assert kinds(effects) == ["CancelAt", "Release", "Route"]
    cancel, retry = effects[0], effects[2]
    assert isinstance(cancel, CancelAt)
    assert cancel.replica == P0
    assert isinstance(retry, Route)
    assert (retry.request.excluded, retry.request.num_samples, retry.request.num_tokens) == (("d0",), 2, 4)
    fresh, resumed = submissions(route(request, P1, D1))
    assert (fresh.attempt, resumed.attempt) == (2, 3)
    assert fresh.samples == (SampleState(2, sample_seed(5, 2), b""),)
    assert resumed.samples == (SampleState(0, 5, raw(truth(0, 1))),)
    assert request.on_delta(D0, delta(0, 1, 1, 4), 3.0) == []  # of the old attempt
    assert kinds(request.on_delta(P1, delta(0, 1, 1, 4, attempt=3), 3.0)) == ["OutputDelta"]
    again = request.on_lost(D1, "reset", 4.0)
    cancels = [(it.replica, it.cancel.attempt) for it in again if isinstance(it, CancelAt)]
    assert cancels == [(P1, 2), (P1, 3)]
    assert [it.attempt for it in submissions(route(request, None, D0))] == [4, 5]


def test_a_prefill_replica_is_needed_until_all_first_tokens_and_the_hand_over_are_here() -> None:
    for has_token, has_hand_over in ((False, True), (True, False), (True, True)):
        request = make_request()
        request.start(0.0)
        route(request, P0, D0)
        if has_token:
            request.on_delta(P0, delta(0, 0, 1, 6), 1.0)
        if has_hand_over:
            request.on_handed_over(D0, handed_over(), 1.0)
        retries = kinds(request.on_lost(P0, "reset", 2.0))
        assert retries == ([] if has_token and has_hand_over else ["CancelAt", "Release", "Route"])


@pytest.mark.parametrize(
    ("code", "refused_by", "excluded", "avoided"),
    [
        ("peer", "", ("d0",), False),
        ("internal", "", ("p0",), False),
        ("refused", "", ("p0",), True),
        ("refused", "d0", ("d0",), True),
    ],
)
def test_who_is_blamed_for_a_failure(
    code: str, refused_by: str, excluded: tuple[str, ...], avoided: bool
) -> None:
    request = make_request()
    request.start(0.0)
    route(request, P0, D0)
    *_, retry = request.on_failed(P0, RequestFailed("r", 1, code, "why", 0.5, refused_by), 1.0)
    assert isinstance(retry, Route)
    assert retry.request.excluded == excluded
    assert (retry.delay_s, retry.needs_capacity) == (0.0, avoided)
    if code == "peer":  # without another decode replica, d0 shall do it without p0, which has no way there
        (alone,) = request.on_no_route("none left", 1.0, 1.0)
        assert isinstance(alone, Route)
        assert (alone.request.excluded, alone.delay_s) == (("p0",), 0.0)
    (again,) = request.on_no_route("none left", 1.0, 1.0)  # then anyone will do
    assert isinstance(again, Route)
    assert again.request.excluded == ()
    assert (again.delay_s == 0.0) == (code != "peer")


def test_crowded_replicas_send_a_request_back_a_few_times_which_is_no_failure() -> None:
    request = make_request(max_attempts=1)
    request.start(0.0)
    for number in range(1, MOST_RETURNS + 1):
        (sent,) = route(request, P0, D0, most_backlog_tokens=100)
        assert isinstance(sent, Submit)
        assert sent.submission.most_backlog_tokens == 100
        *_, again = request.on_failed(P0, RequestFailed("r", number, "crowded", "why"), 1.0)
        assert isinstance(again, Route)
        assert (again.request.excluded, again.delay_s, again.needs_capacity) == ((), 0.0, False)
    (last,) = route(request, P0, D0, most_backlog_tokens=100)
    assert isinstance(last, Submit)
    assert last.submission.most_backlog_tokens is None, "it is taken now, whatever waits there"
    *_, fail = request.on_failed(P0, RequestFailed("r", MOST_RETURNS + 1, "crowded", "again"), 1.0)
    assert isinstance(fail, Fail), "who says that nevertheless is at fault"


def test_after_a_real_failure_a_request_is_not_sent_back() -> None:
    request = make_request()
    request.start(0.0)
    route(request, P0, D0, most_backlog_tokens=100)
    request.on_failed(P0, RequestFailed("r", 1, "crowded", "why"), 1.0)
    route(request, P0, D0, most_backlog_tokens=100)
    request.on_failed(P0, RequestFailed("r", 2, "internal", "why"), 1.0)
    (sent,) = route(request, P1, D1, most_backlog_tokens=100)
    assert isinstance(sent, Submit)
    assert sent.submission.most_backlog_tokens is None


def test_attempts_are_bounded() -> None:
    request = make_request(max_attempts=2)
    request.start(0.0)
    route(request, P0, D0)
    request.on_delta(D0, TokenDelta("r", 1, 0, 1, b"abc", (), ""), 1.0)
    route(request, P1, D1)
    *_, fail = request.on_delta(D1, TokenDelta("r", 2, 0, 1, b"abc", (), ""), 2.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, UnavailableError)
    assert "attempt 2 of 2" in str(fail.error)


def test_patience_without_a_route_ends() -> None:
    request = make_request()
    request.start(0.0)
    now, delays = 0.0, []
    effects = request.on_no_route("nobody", 2.0, now)
    while isinstance(action := effects[-1], Route):
        delays.append(action.delay_s)
        now += action.delay_s
        effects = request.on_no_route("nobody", 2.0, now)
    assert now >= request.prepared.first_patience_s
    assert delays == sorted(delays)
    assert isinstance(action, Fail)
    assert isinstance(action.error, UnavailableError)
    assert action.error.retry_after_s == 2.0


def test_refusals_to_the_end_are_overload() -> None:
    request = make_request(max_attempts=1)
    request.start(0.0)
    route(request, P0, D0)
    *_, fail = request.on_failed(P0, RequestFailed("r", 1, "refused", "full", 3.0), 1.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, OverloadedError)
    assert 3.0 <= fail.error.retry_after_s <= 3.0 * 1.25, "not all come back at once"


@pytest.mark.parametrize(
    ("code", "of_tools", "error"),
    [
        ("deadline", False, DeadlineError),
        ("invalid", False, InvalidRequestError),
        ("grammar", False, GrammarError),
        ("grammar", True, InvalidToolsError),
    ],
)
def test_failures_that_are_final(code: str, of_tools: bool, error: type[Exception]) -> None:
    request = make_request(is_grammar_of_tools=of_tools)
    request.start(0.0)
    route(request, P0, D0)
    *_, fail = request.on_failed(P0, RequestFailed("r", 1, code, "why"), 1.0)
    assert isinstance(fail, Fail)
    assert type(fail.error) is error


def test_a_deadline_is_handed_on_as_what_remains() -> None:
    request = make_request(deadline_at=10.0)
    request.start(0.0)
    (submission,) = submissions(route(request, P0, D0))
    assert submission.deadline_s == 9.0
    assert kinds(request.on_deadline(10.0)) == ["CancelAt", "CancelAt", "Release", "Fail"]


def test_an_end_by_a_stop_string_cancels_what_still_runs() -> None:
    request = make_request(max_tokens=9, stops=(chr(truth(0, 2)[1]),))
    request.start(0.0)
    route(request, P0, D0)
    effects = request.on_delta(P0, delta(0, 0, 4, 9), 1.0)
    assert kinds(effects) == ["OutputDelta", "CancelAt", "CancelAt", "Release", "Finish"]
    emit = effects[0]
    assert isinstance(emit, OutputDelta)
    assert (len(emit.tokens), emit.text, emit.finish) == (8, chr(truth(0, 1)[0]), "stop")


def test_a_cancelled_request_gives_back_a_late_route() -> None:
    request = make_request()
    request.start(0.0)
    assert kinds(request.on_cancel(AbandonedError("left"), 0.5)) == ["Fail"]
    assert route(request, P0, D0) == [Release()]
    assert request.on_cancel(AbandonedError("again"), 0.6) == []


def test_a_resumed_request_that_misses_nothing_is_finished_at_once() -> None:
    done = SampleStart(0, 5, raw(truth(0, 2)), "stop")
    request = make_request(starts=(done,))
    (finish,) = request.start(0.0)
    assert isinstance(finish, Finish)
    assert [(it.finish, it.num_tokens) for it in finish.summary.samples] == [("stop", 2)]


def test_garbled_tokens_are_the_replicas_fault() -> None:
    request = make_request()
    request.start(0.0)
    route(request, P0, D0)
    *_, retry = request.on_delta(D0, TokenDelta("r", 1, 0, 1, b"abc", (), ""), 1.0)
    assert isinstance(retry, Route)
    assert retry.request.excluded == ("d0",)


def test_seeds_of_samples_differ_and_are_64_bit() -> None:
    seeds = {sample_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(50)}
    assert len(seeds) == 150
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed(17, 0) == 17
