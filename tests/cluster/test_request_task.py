"""Carrying a journey: buffers, timers, links that vanish. The router and the Links are stand-ins here."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cluster.errors import DeadlineError, RequestError, SlowClientError, UnavailableError
from cluster.gateway.actions import Emit
from cluster.gateway.migration import NOWHERE_PAUSE_S
from cluster.gateway.request_state import RequestState
from cluster.gateway.request_task import MAX_UNREAD, OutputBuffer, RequestTask
from cluster.metrics.ended_request import Summary
from cluster.text.preprocess import PreparedRequest, SampleStart
from cluster.text.tokenizer import SampleText
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity
from router.errors import NoReplicaError
from router.messages import Decision, RouteRequest
from workers.messages import (
    Cancel,
    HandOverTarget,
    Move,
    MoveEnded,
    PrefillReport,
    SamplingParams,
    StageTimes,
    Submission,
    TokenDelta,
    TokenLogprob,
)

D0, D1 = ReplicaIdentity("d0", 1), ReplicaIdentity("d1", 1)


class Nothing:
    """A detokenizer that shows nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Field:
    """Links to d0 and d1, and a router that takes the first that is not excluded."""

    def __init__(self) -> None:
        self.known = [D0, D1]
        self.gone: set[ReplicaIdentity] = set()
        self.sent: list[tuple[ReplicaIdentity, Submission | Cancel | Move]] = []
        self.finished: list[str] = []

    def target(self, replica_id: str) -> HandOverTarget | None:
        return next((HandOverTarget(it, "a") for it in self.known if it.replica_id == replica_id), None)

    def send(self, replica: ReplicaIdentity, message: Submission | Cancel | Move) -> bool:
        if replica in self.gone:
            return False
        self.sent.append((replica, message))
        return True

    def route(self, request: RouteRequest) -> Decision:
        usable = [it for it in self.known if it.replica_id not in request.excluded]
        if not usable:
            raise NoReplicaError("nobody", 3.0)
        return Decision("r", "cost", "", usable[0].replica_id, 0, 0, (), "")

    def route_move(self, request: RouteRequest) -> str:
        return self.route(request).decode

    def on_prefilled(self, request_id: str) -> None:
        pass

    def on_finished(self, request_id: str) -> None:
        self.finished.append(request_id)


class Ended:
    """Remembers how walks ended."""

    def __init__(self) -> None:
        self.errors: list[RequestError | None] = []

    def __call__(self, error: RequestError | None) -> None:
        self.errors.append(error)


def make_walk(
    field: Field, clock: ManualClock, deadline_at: float | None = None
) -> tuple[RequestTask, Ended]:
    plan = PreparedRequest(
        request_id="r",
        tenant="",
        priority=0,
        prompt=tokens(1),
        block_keys=(),
        sampling=SamplingParams(max_tokens=1 << 20),
        samples=(SampleStart(0, 1),),
        deadline_at=deadline_at,
    )
    ended = Ended()
    journey = RequestState(plan, [SampleText(Nothing())], clock.now())
    return RequestTask(journey, links=field, router=field, clock=clock, on_end=ended), ended


def tokens(count: int) -> bytes:
    return np.ones(count, dtype="<u4").tobytes()


def delta(first: int, count: int, finish: str = "") -> TokenDelta:
    return TokenDelta("r", 1, 0, first, tokens(count), (), finish)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)


async def test_output_that_waits_is_merged() -> None:
    walk, ended = make_walk(Field(), ManualClock())
    walk.begin()
    for first in range(5):
        walk.on_delta(D0, delta(first, 1))
    merged = await walk.next()
    assert isinstance(merged, Emit)
    assert (merged.first_index, merged.tokens) == (0, tokens(5))
    walk.on_delta(D0, delta(5, 1, "length"))
    last = await walk.next()
    assert isinstance(last, Emit)
    assert (last.first_index, last.finish) == (5, "length")
    assert isinstance(await walk.next(), Summary)
    assert ended.errors == [None]


async def test_a_client_that_never_reads_is_cut_off() -> None:
    field = Field()
    walk, ended = make_walk(field, ManualClock())
    walk.begin()
    walk.on_delta(D0, delta(0, MAX_UNREAD + 1))
    with pytest.raises(SlowClientError):
        await walk.next()
    assert [type(error) for error in ended.errors] == [SlowClientError]
    assert isinstance(field.sent[-1][1], Cancel)


async def test_logprobs_count_as_unread_too() -> None:
    outbox = OutputBuffer()
    logprob = TokenLogprob(-1.0, ((1, -1.0), (2, -2.0)))
    outbox.put(Emit(0, 0, tokens(2), "", (logprob, logprob), ""))
    assert outbox.num_unread == 8
    await outbox.get()
    assert outbox.num_unread == 0


async def test_a_link_that_is_gone_at_submission_means_another_replica() -> None:
    field = Field()
    field.gone.add(D0)
    walk, _ = make_walk(field, ManualClock())
    walk.begin()
    ((replica, message),) = field.sent
    assert replica == D1
    assert isinstance(message, Submission)
    assert message.attempt == 2


async def test_a_routed_replica_that_vanished_is_asked_for_again() -> None:
    field, clock = Field(), ManualClock()
    field.target = lambda replica_id: None  # type: ignore[method-assign]
    walk, _ = make_walk(field, clock)
    walk.begin()
    assert field.finished == ["r"]
    del field.target
    await settle()
    clock.advance(1.0)
    await settle()
    assert [replica for replica, _ in field.sent] == [D0]
    walk.abandon()


async def test_a_stream_that_has_nowhere_to_move_asks_again_after_a_pause() -> None:
    field, clock = Field(), ManualClock()
    walk, _ = make_walk(field, clock)
    walk.begin()
    walk.on_prefilled(PrefillReport("r", 1, 1, 0, StageTimes()))
    walk.on_delta(D0, delta(0, 1))
    field.known = [D0]
    walk.on_streams(D0, may_stay=False)
    assert [type(message) for _, message in field.sent] == [Submission]
    field.known = [D0, D1]
    await settle()
    clock.advance(NOWHERE_PAUSE_S)
    await settle()
    assert field.sent[1:] == [(D0, Move("r", 1, HandOverTarget(D1, "a")))]
    walk.on_move_ended(D0, MoveEnded("r", 1, D1))
    walk.abandon()
    assert field.sent[2:] == [(D1, Cancel("r", 1))]


async def test_a_target_that_vanished_is_taken_back_at_the_router() -> None:
    field, clock = Field(), ManualClock()
    walk, _ = make_walk(field, clock)
    walk.begin()
    walk.on_prefilled(PrefillReport("r", 1, 1, 0, StageTimes()))
    field.target = lambda replica_id: None  # type: ignore[method-assign]
    walk.on_streams(D0, may_stay=False)
    assert field.finished == ["r"]
    walk.abandon()


async def test_patience_runs_on_the_clock() -> None:
    field, clock = Field(), ManualClock()
    field.known = []
    walk, ended = make_walk(field, clock)
    walk.begin()
    for _ in range(20):
        await settle()
        clock.advance(0.2)
    await settle()
    assert [type(error) for error in ended.errors] == [UnavailableError]


async def test_the_deadline_runs_on_the_clock() -> None:
    field, clock = Field(), ManualClock()
    walk, ended = make_walk(field, clock, deadline_at=5.0)
    walk.begin()
    await settle()
    clock.advance(4.9)
    await settle()
    assert ended.errors == []
    clock.advance(0.1)
    await settle()
    assert [type(error) for error in ended.errors] == [DeadlineError]
    with pytest.raises(DeadlineError):
        await walk.next()
    walk.abandon()
    assert len(ended.errors) == 1
