"""The requests of one gateway: accepted here, run by a `RequestTask` each, remembered after the end.

`ReplicaConnections` report here what replicas send, and each request gets its part.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from cluster.errors import (
    AbandonedError,
    DeadlineError,
    DuplicateRequestError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownRequestError,
    to_grpc_status,
)
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.gateway.request_task import RequestTask, Router
from cluster.metrics.ended_request import Caller, EndedRequest, Observer, RoutedAttempt, TimelineEntry
from cluster.metrics.gateway_counters import GatewayCounters
from cluster.proto import tandem_pb2 as pb
from cluster.text.preprocess import PreparedRequest, Preprocessor, ServingLimits, check_request
from cluster.text.tokenizer import SampleText
from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import Cancel, StepFrame

# Ended requests that `Explain` remembers.
NUM_RECORDS = 1024
_NUM_STALE = 1024
_NOBODY = Caller()
# Of the id and the tenant of a refused request, which may be of any length.
_MAX_LOGGED_CHARS = 128

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What is known of a request. `state` is "running", "finished", "cancelled" or "failed"."""

    request_id: str
    state: str
    reason: str
    started_at: float
    decisions: tuple[RoutedAttempt, ...]
    timeline: tuple[TimelineEntry, ...]
    tenant: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    # 0: there is none yet.
    first_token_at: float = 0.0
    # 0: it is running.
    ended_at: float = 0.0


class Accepted(NamedTuple):
    """A running request."""

    task: RequestTask
    request_id: str
    seed: int
    num_prompt_tokens: int


class RequestManager:
    """All requests of a gateway.

    A request is kept by its id on the wire, which is new for every call; by the client's own id it can be
    found (`record`) and, when the client calls again to resume it, taken over.
    """

    def __init__(
        self,
        *,
        preprocessor: Preprocessor,
        connections: ReplicaConnections,
        router: Router,
        clock: Clock,
        max_requests: int,
        on_members: Callable[[], None],
        counters: GatewayCounters,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._preprocessor = preprocessor
        self._connections = connections
        self._router = router
        self._clock = clock
        self._max_requests = max_requests
        self._members_changed = on_members
        self._observers = (counters.ended, *observers)
        self.counters = counters
        self._tasks: dict[str, RequestTask] = {}
        # Running, by the client's request id.
        self._latest: dict[str, RequestTask] = {}
        self._records: OrderedDict[str, RequestInfo] = OrderedDict()
        self._stale: OrderedDict[tuple[ReplicaIdentity, str, int], None] = OrderedDict()
        self._num_arriving = 0
        self._is_leaving = False

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def limits(self) -> ServingLimits:
        """Return what a request may ask for now."""
        return self._preprocessor.limits(self._connections.max_context_tokens)

    async def accept(
        self, request: pb.GenerateRequest, deadline_s: float | None, caller: Caller = _NOBODY
    ) -> Accepted:
        """Check, tokenize and start the request; raise the `RequestError` that says why it cannot be.

        `deadline_s` is what remains of the client's deadline (None: none).
        """
        now = self._clock.now()
        try:
            return await self._accept(request, deadline_s, caller, now)
        except RequestError as error:
            self._observe(
                EndedRequest(
                    request_id=request.request_id[:_MAX_LOGGED_CHARS],
                    wire_id="",
                    tenant=request.tenant[:_MAX_LOGGED_CHARS],
                    caller=caller,
                    state="refused",
                    code=to_grpc_status(error).code.name,
                    reason=str(error),
                    started_at=now,
                    ended_at=self._clock.now(),
                )
            )
            raise

    async def _accept(
        self, request: pb.GenerateRequest, deadline_s: float | None, caller: Caller, now: float
    ) -> Accepted:
        if len(self._tasks) + self._num_arriving >= self._max_requests:
            raise OverloadedError(f"this gateway has {self._max_requests} requests, the most it takes")
        limits = self.limits()
        check_request(request, limits)
        self._num_arriving += 1
        try:
            prompt = await self._preprocessor.prompt_tokens(request, limits)
        finally:
            self._num_arriving -= 1
        compatibility = self._connections.compatibility
        if self._is_leaving:
            raise UnavailableError("this gateway is stopping", 0.0)
        if compatibility is None:
            raise UnavailableError("no replica has connected to this gateway yet")
        prepared, texts = self._preprocessor.prepare(
            request,
            prompt,
            limits,
            fingerprint=compatibility.model_fingerprint,
            sharing_group=request.tenant,
            deadline_at=None if deadline_s is None else now + deadline_s,
        )
        if deadline_s is not None and now + deadline_s <= self._clock.now():
            raise DeadlineError("the deadline passed before the request was accepted")
        request_id = request.request_id or prepared.request_id
        task = self._begin(request_id, prepared, texts, now, caller, resumes=bool(request.resume))
        return Accepted(task, request_id, prepared.seed, prepared.num_prompt_tokens)

    def record(self, request_id: str) -> RequestInfo:
        """Return what is known of a running or recent request, or raise `UnknownRequestError`."""
        task = self._latest.get(request_id)
        if task is not None:
            return _record(request_id, task, "running", "")
        known = self._records.get(request_id)
        if known is None:
            what = f"request {request_id[:128]!r} is neither running at this gateway nor"
            raise UnknownRequestError(f"{what} one of the last {NUM_RECORDS} that ended here")
        return known

    def latest(self, limit: int) -> list[RequestInfo]:
        """Return at most `limit` running requests and as many that ended, the latest arrivals first."""
        latest = islice(reversed(self._latest.items()), limit)
        running = [_record(request_id, task, "running", "") for request_id, task in latest]
        ended = (it for it in reversed(self._records.values()) if it.request_id not in self._latest)
        return sorted([*running, *islice(ended, limit)], key=lambda it: it.started_at, reverse=True)

    def leave(self) -> None:
        """Accept no more requests; those that run continue."""
        self._is_leaving = True

    def close(self) -> None:
        """End every request with UNAVAILABLE, so that clients resume at another gateway; accept none."""
        self.leave()
        for task in list(self._tasks.values()):
            task.abandon(UnavailableError("this gateway is stopping", 0.0))

    # -------------------------------------------------------------- from the connections to replicas

    def on_step(self, source: ReplicaIdentity, frame: StepFrame) -> None:
        """Pass each request its part, in the order in which that matters within a step."""
        now = self._clock.now()
        for report in frame.prefills:
            if (task := self._current(source, report.request_id, report.attempt)) is not None:
                self.counters.prefilled(report, now)
                task.apply(task.state.on_prefilled, report)
        for joined in frame.hand_overs:
            if (task := self._current(source, joined.request_id, joined.attempt)) is not None:
                task.apply(task.state.on_handed_over, source, joined)
        for delta in frame.deltas:
            if (task := self._current(source, delta.request_id, delta.attempt)) is not None:
                self.counters.streamed(source.replica_id, delta, now)
                task.apply(task.state.on_delta, source, delta)
        for isolated in frame.isolations:
            if (task := self._tasks.get(isolated.request_id)) is not None:
                task.apply(task.state.on_isolated, source, isolated)
        for failure in frame.failures:
            if (task := self._tasks.get(failure.request_id)) is not None:
                self.counters.attempt_failed(source.replica_id, failure.code, now)
                task.apply(task.state.on_failed, source, failure)
        for ended in frame.moves:
            if (task := self._tasks.get(ended.request_id)) is not None:
                task.apply(task.state.on_move_ended, source, ended)

    def on_lost(self, source: ReplicaIdentity, reason: str) -> None:
        """Report to every request that a replica is lost."""
        view = self._connections.find(source.replica_id)
        if view is not None and not view.record.leaving:
            self.counters.lost(view.record.pool)
        for task in list(self._tasks.values()):
            task.apply(task.state.on_lost, source, reason)

    def on_streams(self, source: ReplicaIdentity, may_stay: bool) -> None:
        """Report to every request that streams must leave this replica, or may stay there after all."""
        for task in list(self._tasks.values()):
            task.apply(task.state.on_streams, source, may_stay)

    def on_members(self) -> None:
        """Report that what can be served may have changed."""
        self._members_changed()

    def _current(self, source: ReplicaIdentity, request_id: str, attempt: int) -> RequestTask | None:
        """Return the request whose running attempt this is; otherwise order the replica to stop, once."""
        task = self._tasks.get(request_id)
        if task is not None and task.state.is_current(attempt):
            return task
        key = (source, request_id, attempt)
        if key not in self._stale:
            self._stale[key] = None
            if len(self._stale) > _NUM_STALE:
                self._stale.popitem(last=False)
            self._connections.send(source, Cancel(request_id, attempt))
        return None

    # ------------------------------------------------------------------------------------ requests

    def _begin(
        self,
        request_id: str,
        prepared: PreparedRequest,
        texts: Sequence[SampleText],
        now: float,
        caller: Caller,
        *,
        resumes: bool,
    ) -> RequestTask:
        older = self._latest.get(request_id)
        if older is not None and not resumes:
            raise DuplicateRequestError(f"request {request_id!r} is running; choose another id, or resume it")
        if older is not None:
            older.abandon(AbandonedError("taken over by a call that resumes it"))

        def on_end(error: RequestError | None) -> None:
            self._end(request_id, task, error, caller)

        task = RequestTask(
            prepared,
            texts,
            connections=self._connections,
            router=self._router,
            clock=self._clock,
            on_end=on_end,
            started_at=now,
        )
        self._tasks[prepared.request_id] = self._latest[request_id] = task
        self.counters.arrived(prepared, now)
        task.begin()
        return task

    def _end(self, request_id: str, task: RequestTask, error: RequestError | None, caller: Caller) -> None:
        request, prepared = task.state, task.state.prepared
        del self._tasks[prepared.request_id]
        if self._latest.get(request_id) is task:
            del self._latest[request_id]
        reason = str(error) if error else ""
        if error is None:
            state = "finished"
        elif isinstance(error, AbandonedError):
            state = "cancelled"
        else:
            state = "failed"
            _log.info("request %s failed: %s", request_id, error, extra={"request_id": request_id})
        self._records.pop(request_id, None)
        now = self._clock.now()
        self._records[request_id] = _record(request_id, task, state, reason, now)
        if len(self._records) > NUM_RECORDS:
            self._records.popitem(last=False)
        self._observe(
            EndedRequest(
                request_id=request_id,
                wire_id=prepared.request_id,
                tenant=prepared.tenant,
                caller=caller,
                state=state,
                code=to_grpc_status(error).code.name if error else "OK",
                reason=reason,
                started_at=request.started_at,
                ended_at=now,
                summary=request.summary(now),
                decisions=tuple(request.decisions),
                timeline=tuple(request.timeline),
                prepared=prepared,
            )
        )

    def _observe(self, ended: EndedRequest) -> None:
        for observe in self._observers:
            observe(ended)


def _record(
    request_id: str, task: RequestTask, state: str, reason: str, ended_at: float = 0.0
) -> RequestInfo:
    request = task.state
    return RequestInfo(
        request_id=request_id,
        state=state,
        reason=reason,
        started_at=request.started_at,
        decisions=tuple(request.decisions),
        timeline=tuple(request.timeline),
        tenant=request.prepared.tenant,
        num_prompt_tokens=request.prepared.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        first_token_at=request.first_token_at,
        ended_at=ended_at,
    )
