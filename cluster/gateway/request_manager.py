"""The requests of one gateway: accepted here, carried by a `RequestTask` each, remembered for a while when ended.

The Links bring news of replicas here, and each request gets its part.
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
from cluster.gateway.replica_connections import ReplicaLinks
from cluster.gateway.request_state import RequestState
from cluster.gateway.request_task import RequestTask, Router
from cluster.metrics.ended_request import Caller, EndedRequest, Observer, RoutedAttempt, TimelineEntry
from cluster.metrics.gateway_counters import GatewayCounters
from cluster.proto import tandem_pb2 as pb
from cluster.text.preprocess import Preprocessed, Preprocessor
from cluster.text.validation import Limits, check_request
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity
from workers.messages import Cancel, StepFrame

# Ended requests that `Explain` remembers.
NUM_RECORDS = 1024
_NUM_STALE = 1024
_NOBODY = Caller()
# Of the id and the tenant of a refused request, which may be of any length.
_MAX_TOLD_CHARS = 128

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What is known of a request. `state`: "running", "finished", "cancelled" or "failed"."""

    request_id: str
    state: str
    reason: str
    started_at: float
    decisions: tuple[RoutedAttempt, ...]
    timeline: tuple[TimelineEntry, ...]
    tenant: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    # 0: none yet.
    first_token_at: float = 0.0
    # 0: it runs.
    ended_at: float = 0.0


class Accepted(NamedTuple):
    """A request on its way."""

    walk: RequestTask
    request_id: str
    seed: int
    num_prompt_tokens: int


class RequestManager:
    """All requests of a gateway.

    A request lives under its id on the wire, which is new for every call; under the client's own id it can
    be found (`record`) and, when the client calls again to resume it, taken over.
    """

    def __init__(
        self,
        *,
        intake: Preprocessor,
        links: ReplicaLinks,
        router: Router,
        clock: Clock,
        max_requests: int,
        on_members: Callable[[], None],
        counters: GatewayCounters,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._intake = intake
        self._links = links
        self._router = router
        self._clock = clock
        self._max_requests = max_requests
        self._members_changed = on_members
        self._observers = (counters.ended, *observers)
        self.counters = counters
        self._walks: dict[str, RequestTask] = {}
        # Running, by the client's request id.
        self._latest: dict[str, RequestTask] = {}
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._stale: OrderedDict[tuple[ReplicaIdentity, str, int], None] = OrderedDict()
        self._num_arriving = 0
        self._is_leaving = False

    @property
    def num_running(self) -> int:
        return len(self._walks)

    def limits(self) -> Limits:
        """What a request may ask for now."""
        return self._intake.limits(self._links.max_context_tokens)

    async def accept(
        self, request: pb.GenerateRequest, deadline_s: float | None, caller: Caller = _NOBODY
    ) -> Accepted:
        """Check, tokenize and start the request; a `RequestError` says why not.

        `deadline_s` is what remains of the client's deadline (None: none).
        """
        now = self._clock.now()
        try:
            return await self._accept(request, deadline_s, caller, now)
        except RequestError as error:
            self._tell(
                EndedRequest(
                    request_id=request.request_id[:_MAX_TOLD_CHARS],
                    wire_id="",
                    tenant=request.tenant[:_MAX_TOLD_CHARS],
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
        if len(self._walks) + self._num_arriving >= self._max_requests:
            raise OverloadedError(f"this gateway has {self._max_requests} requests, the most it takes")
        limits = self.limits()
        check_request(request, limits)
        self._num_arriving += 1
        try:
            prompt = await self._intake.prompt_tokens(request, limits)
        finally:
            self._num_arriving -= 1
        compatibility = self._links.compatibility
        if self._is_leaving:
            raise UnavailableError("this gateway is stopping", 0.0)
        if compatibility is None:
            raise UnavailableError("no replica has connected to this gateway yet")
        planned = self._intake.plan(
            request,
            prompt,
            limits,
            fingerprint=compatibility.model_fingerprint,
            deadline_at=None if deadline_s is None else now + deadline_s,
        )
        if deadline_s is not None and now + deadline_s <= self._clock.now():
            raise DeadlineError("the deadline passed before the request was accepted")
        request_id = request.request_id or planned.plan.request_id
        walk = self._begin(request_id, planned, now, caller, resumes=bool(request.resume))
        return Accepted(walk, request_id, planned.seed, len(prompt) // TOKEN_BYTES)

    def record(self, request_id: str) -> RequestRecord:
        """Of a running or recent request; `UnknownRequestError` when there is none."""
        walk = self._latest.get(request_id)
        if walk is not None:
            return _record(request_id, walk, "running", "")
        known = self._records.get(request_id)
        if known is None:
            what = f"request {request_id[:128]!r} is neither running at this gateway nor"
            raise UnknownRequestError(f"{what} one of the last {NUM_RECORDS} that ended here")
        return known

    def recent(self, limit: int) -> list[RequestRecord]:
        """At most `limit` running requests and as many that ended, together, the latest arrivals first."""
        latest = islice(reversed(self._latest.items()), limit)
        running = [_record(request_id, walk, "running", "") for request_id, walk in latest]
        ended = (it for it in reversed(self._records.values()) if it.request_id not in self._latest)
        return sorted([*running, *islice(ended, limit)], key=lambda it: it.started_at, reverse=True)

    def leave(self) -> None:
        """Accept no more requests; those that run go on."""
        self._is_leaving = True

    def close(self) -> None:
        """End every request with UNAVAILABLE, so that clients resume at another gateway; accept none."""
        self.leave()
        for walk in list(self._walks.values()):
            walk.abandon(UnavailableError("this gateway is stopping", 0.0))

    # ------------------------------------------------------------------------------ from the Links

    def on_step(self, source: ReplicaIdentity, frame: StepFrame) -> None:
        """Each request gets its news, in the order in which they matter within a step."""
        now = self._clock.now()
        for report in frame.prefills:
            if (walk := self._walk(source, report.request_id, report.attempt)) is not None:
                self.counters.prefilled(report, now)
                walk.on_prefilled(report)
        for joined in frame.hand_overs:
            if (walk := self._walk(source, joined.request_id, joined.attempt)) is not None:
                walk.on_handed_over(source, joined)
        for delta in frame.deltas:
            if (walk := self._walk(source, delta.request_id, delta.attempt)) is not None:
                self.counters.streamed(source.replica_id, delta, now)
                walk.on_delta(source, delta)
        for isolated in frame.isolations:
            if (walk := self._walks.get(isolated.request_id)) is not None:
                walk.on_isolated(source, isolated)
        for failure in frame.failures:
            if (walk := self._walks.get(failure.request_id)) is not None:
                self.counters.attempt_failed(source.replica_id, failure.code, now)
                walk.on_failed(source, failure)
        for ended in frame.moves:
            if (walk := self._walks.get(ended.request_id)) is not None:
                walk.on_move_ended(source, ended)

    def on_lost(self, source: ReplicaIdentity, reason: str) -> None:
        """Every request that runs there must know."""
        view = self._links.find(source.replica_id)
        if view is not None and not view.record.leaving:
            self.counters.lost(view.record.pool)
        for walk in list(self._walks.values()):
            walk.on_lost(source, reason)

    def on_streams(self, source: ReplicaIdentity, may_stay: bool) -> None:
        """Streams shall leave this replica, or may stay there after all."""
        for walk in list(self._walks.values()):
            walk.on_streams(source, may_stay)

    def on_members(self) -> None:
        self._members_changed()

    def _walk(self, source: ReplicaIdentity, request_id: str, attempt: int) -> RequestTask | None:
        """The request, if this attempt is its current one; otherwise the replica is told to stop, once."""
        walk = self._walks.get(request_id)
        if walk is not None and walk.journey.is_current(attempt):
            return walk
        key = (source, request_id, attempt)
        if key not in self._stale:
            self._stale[key] = None
            if len(self._stale) > _NUM_STALE:
                self._stale.popitem(last=False)
            self._links.send(source, Cancel(request_id, attempt))
        return None

    # ------------------------------------------------------------------------------------ requests

    def _begin(
        self, request_id: str, planned: Preprocessed, now: float, caller: Caller, *, resumes: bool
    ) -> RequestTask:
        older = self._latest.get(request_id)
        if older is not None and not resumes:
            raise DuplicateRequestError(f"request {request_id!r} is running; choose another id, or resume it")
        if older is not None:
            older.abandon(AbandonedError("taken over by a call that resumes it"))

        def on_end(error: RequestError | None) -> None:
            self._end(request_id, walk, error, caller)

        walk = RequestTask(
            RequestState(planned.plan, planned.texts, now),
            links=self._links,
            router=self._router,
            clock=self._clock,
            on_end=on_end,
        )
        self._walks[planned.plan.request_id] = self._latest[request_id] = walk
        self.counters.arrived(planned.plan, now)
        walk.begin()
        return walk

    def _end(self, request_id: str, walk: RequestTask, error: RequestError | None, caller: Caller) -> None:
        del self._walks[walk.journey.plan.request_id]
        if self._latest.get(request_id) is walk:
            del self._latest[request_id]
        if error is None:
            state = "finished"
        elif isinstance(error, AbandonedError):
            state = "cancelled"
        else:
            state = "failed"
            _log.info("request %s failed: %s", request_id, error, extra={"request_id": request_id})
        self._records.pop(request_id, None)
        now = self._clock.now()
        self._records[request_id] = _record(request_id, walk, state, str(error) if error else "", now)
        if len(self._records) > NUM_RECORDS:
            self._records.popitem(last=False)
        plan = walk.journey.plan
        self._tell(
            EndedRequest(
                request_id=request_id,
                wire_id=plan.request_id,
                tenant=plan.tenant,
                caller=caller,
                state=state,
                code=to_grpc_status(error).code.name if error else "OK",
                reason=str(error) if error else "",
                started_at=walk.journey.started_at,
                ended_at=now,
                summary=walk.journey.summary(now),
                decisions=tuple(walk.journey.decisions),
                timeline=tuple(walk.journey.timeline),
                plan=plan,
            )
        )

    def _tell(self, ended: EndedRequest) -> None:
        for observe in self._observers:
            observe(ended)


def _record(
    request_id: str, walk: RequestTask, state: str, reason: str, ended_at: float = 0.0
) -> RequestRecord:
    journey = walk.journey
    return RequestRecord(
        request_id=request_id,
        state=state,
        reason=reason,
        started_at=journey.started_at,
        decisions=tuple(journey.decisions),
        timeline=tuple(journey.timeline),
        tenant=journey.plan.tenant,
        num_prompt_tokens=len(journey.plan.prompt) // TOKEN_BYTES,
        num_output_tokens=journey.num_output_tokens,
        first_token_at=journey.first_token_at,
        ended_at=ended_at,
    )
