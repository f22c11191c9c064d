"""Carries one journey: asks the router, writes to the Links, keeps the timers, and buffers the output.

One `RequestTask` per running request; everything happens on the gateway's event loop, without locks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

from cluster.errors import AbandonedError, RequestError, SlowClientError
from cluster.gateway.actions import (
    Action,
    CancelAt,
    Emit,
    Fail,
    Finish,
    MoveAt,
    NotePrefilled,
    Release,
    Route,
    RouteMove,
    Submit,
)
from cluster.gateway.request_state import RequestState
from cluster.metrics.ended_request import Summary
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.clock import Clock
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.messages import ReplicaIdentity
from router.errors import NoReplicaError
from router.messages import Decision, RouteRequest
from workers.messages import (
    Cancel,
    HandOverReport,
    HandOverTarget,
    IsolationReport,
    Move,
    MoveEnded,
    PrefillReport,
    RequestFailed,
    Submission,
    TokenDelta,
)

# Tokens, each with its log-probabilities counted too, that one stream holds for a client that does not read.
# A slower client is cut off with RESOURCE_EXHAUSTED; no other stream waits for it meanwhile.
MAX_UNREAD = 65536


class Links(Protocol):
    """What a walk needs of `cluster.gateway.replica_connections.ReplicaLinks`."""

    def target(self, replica_id: str) -> HandOverTarget | None:
        """The connected replica of this id; None when there is none."""

    def send(self, replica: ReplicaIdentity, message: Submission | Cancel | Move) -> bool:
        """Queue on its Link; False when there is none to this life of the replica."""


class Router(Protocol):
    """What a walk needs of `router.service.RouterService`."""

    def route(self, request: RouteRequest) -> Decision:
        """`NoReplicaError` when there is no place."""

    def route_move(self, request: RouteRequest) -> str:
        """The decode replica that a running stream shall move to; `NoReplicaError` when there is none."""

    def on_prefilled(self, request_id: str) -> None: ...

    def on_finished(self, request_id: str) -> None: ...


class OutputBuffer:
    """Output on its way to the client. What waits is merged per sample, so a slow reader gets fewer, longer
    deltas; the terminal comes last."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Emit]] = {}
        self._terminal: Finish | Fail | None = None
        self._ready = asyncio.Event()
        self.num_unread = 0

    def put(self, emit: Emit) -> None:
        self._waiting.setdefault(emit.sample, []).append(emit)
        self.num_unread += _weight(emit)
        self._ready.set()

    def close(self, terminal: Finish | Fail) -> None:
        """The last entry; what waits before a failure by `SlowClientError` is dropped."""
        if isinstance(terminal, Fail) and isinstance(terminal.error, SlowClientError):
            self._waiting.clear()
        self._terminal = terminal
        self._ready.set()

    async def get(self) -> Emit | Finish | Fail:
        """The next entry; the terminal again and again at the end."""
        await self._ready.wait()
        if self._waiting:
            emits = self._waiting.pop(next(iter(self._waiting)))
            self.num_unread -= sum(_weight(emit) for emit in emits)
            if not self._waiting and self._terminal is None:
                self._ready.clear()
            return _merged(emits)
        assert self._terminal is not None
        return self._terminal


class RequestTask:
    """One request on its way; ends by `Finish`, by `Fail`, or by `abandon` when its client has left."""

    def __init__(
        self,
        journey: RequestState,
        *,
        links: Links,
        router: Router,
        clock: Clock,
        on_end: Callable[[RequestError | None], None],
    ) -> None:
        self.journey = journey
        self._links = links
        self._router = router
        self._clock = clock
        self._on_end = on_end
        self._outbox = OutputBuffer()
        self._timers = SupervisedTasks()

    def begin(self) -> None:
        """Start the journey and the deadline's timer."""
        deadline_at = self.journey.plan.deadline_at
        if deadline_at is not None:
            self._after(deadline_at - self._clock.now(), self._on_deadline)
        self._apply(self.journey.start(self._clock.now()))

    async def next(self) -> Emit | Summary:
        """The next output, or the summary once all was delivered; raises the error of a failed request."""
        entry = await self._outbox.get()
        if isinstance(entry, Fail):
            raise entry.error
        return entry.summary if isinstance(entry, Finish) else entry

    def abandon(self, error: RequestError | None = None) -> None:
        """Nobody waits for the output any more: stop the work wherever it is. Does nothing after the end."""
        error = error or AbandonedError("the client cancelled the call")
        self._apply(self.journey.on_cancel(error, self._clock.now()))

    def on_prefilled(self, report: PrefillReport) -> None:
        self._apply(self.journey.on_prefilled(report, self._clock.now()))

    def on_handed_over(self, source: ReplicaIdentity, report: HandOverReport) -> None:
        self._apply(self.journey.on_handed_over(source, report, self._clock.now()))

    def on_streams(self, replica: ReplicaIdentity, may_stay: bool) -> None:
        """Streams shall leave this replica, or may stay there after all."""
        self._apply(self.journey.on_streams(replica, may_stay))

    def on_move_ended(self, source: ReplicaIdentity, ended: MoveEnded) -> None:
        self._apply(self.journey.on_move_ended(source, ended, self._clock.now()))

    def on_delta(self, source: ReplicaIdentity, delta: TokenDelta) -> None:
        self._apply(self.journey.on_delta(source, delta, self._clock.now()))

    def on_failed(self, source: ReplicaIdentity, failure: RequestFailed) -> None:
        self._apply(self.journey.on_failed(source, failure, self._clock.now()))

    def on_isolated(self, source: ReplicaIdentity, report: IsolationReport) -> None:
        self._apply(self.journey.on_isolated(source, report, self._clock.now()))

    def on_lost(self, replica: ReplicaIdentity, reason: str) -> None:
        """A Link has ended."""
        self._apply(self.journey.on_lost(replica, reason, self._clock.now()))

    # ------------------------------------------------------------------------------------- actions

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Emit):
                self._emit(action)
            elif isinstance(action, Submit):
                if not self._links.send(action.replica, action.submission):
                    self._apply(self.journey.on_unsent(action.replica, self._clock.now()))
                    return
            elif isinstance(action, CancelAt):
                self._links.send(action.replica, action.cancel)
            elif isinstance(action, MoveAt):
                self._links.send(action.replica, action.move)
            elif isinstance(action, Route):
                self._later(action.delay_s, partial(self._route, action.request))
            elif isinstance(action, RouteMove):
                self._later(action.delay_s, self._route_move)
            elif isinstance(action, NotePrefilled):
                self._router.on_prefilled(action.request_id)
            elif isinstance(action, Release):
                self._router.on_finished(action.request_id)
            else:
                self._end(action)

    def _emit(self, emit: Emit) -> None:
        self._outbox.put(emit)
        if self._outbox.num_unread > MAX_UNREAD:
            error = SlowClientError(f"more than {MAX_UNREAD} tokens wait for the client to read them", 0.0)
            self.abandon(error)

    def _end(self, terminal: Finish | Fail) -> None:
        self._timers.cancel()
        self._outbox.close(terminal)
        self._on_end(terminal.error if isinstance(terminal, Fail) else None)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        if delay_s <= 0:
            act()
        else:
            self._after(delay_s, act)

    def _route(self, request: RouteRequest) -> None:
        now = self._clock.now()
        try:
            decision = self._router.route(request)
        except NoReplicaError as error:
            self._apply(self.journey.on_no_route(str(error), error.retry_after_s, now))
            return
        prefill = self._links.target(decision.prefill) if decision.prefill else None
        decode = self._links.target(decision.decode)
        if decode is None or (decision.prefill and prefill is None):
            self._router.on_finished(request.request_id)
            self._apply(self.journey.on_no_route("the chosen replica has just gone", 1.0, now))
            return
        computes = prefill.identity if prefill is not None and prefill != decode else None
        self._apply(self.journey.on_routed(decision, computes, decode, now))

    def _route_move(self) -> None:
        self._apply(self.journey.on_move_time(self._clock.now()))
        request = self.journey.move_request()
        if request is None:
            return
        target = None
        with contextlib.suppress(NoReplicaError):
            target = self._links.target(self._router.route_move(request))
            if target is None:  # it has just gone
                self._router.on_finished(request.request_id)
        self._apply(self.journey.on_move_routed(target, self._clock.now()))

    # -------------------------------------------------------------------------------------- timers

    def _on_deadline(self) -> None:
        self._apply(self.journey.on_deadline(self._clock.now()))

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        async def wait() -> None:
            await self._clock.sleep(max(0.0, delay_s))
            act()

        self._timers.spawn(wait(), "request-timer")


def _weight(emit: Emit) -> int:
    return len(emit.tokens) // TOKEN_BYTES + sum(1 + len(it.top) for it in emit.logprobs)


def _merged(emits: list[Emit]) -> Emit:
    if len(emits) == 1:
        return emits[0]
    return Emit(
        sample=emits[0].sample,
        first_index=emits[0].first_index,
        tokens=b"".join(emit.tokens for emit in emits),
        text="".join(emit.text for emit in emits),
        logprobs=tuple(item for emit in emits for item in emit.logprobs),
        finish=emits[-1].finish,
    )
