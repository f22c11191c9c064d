"""The requests of one gateway: `Acceptance` accepts them, a `RequestTask` runs each, and the latest are kept.

`ReplicaConnections` report here what replicas send, and each request gets its part of a frame.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVarTuple

from cluster.errors import (
    AbandonedError,
    OverloadedError,
    RequestError,
    UnavailableError,
    failures_logged,
    to_grpc_status,
)
from cluster.gateway.acceptance import Acceptance, AcceptedRequest, CallProgress, NewCall
from cluster.gateway.circuit_breaker import BreakerState, CircuitBreaker
from cluster.gateway.loop_slices import LoopSlices
from cluster.gateway.output_buffer import UnreadOutput
from cluster.gateway.prompt_relatives import PromptRelatives
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.gateway.reported_load import may_free_capacity
from cluster.gateway.request_records import RequestRecords
from cluster.gateway.request_state import RequestState
from cluster.gateway.request_task import RequestStart, RequestTask, Router, ended_by_faults
from cluster.gateway.resumed_calls import ResumedCalls
from cluster.gateway.write_turns import WritePause, WriteTurns
from cluster.identity.identity import Identity
from cluster.metrics.ended_request import Caller, EndedRequest, Observer, RequestInfo
from cluster.metrics.gateway_counters import GatewayCounters
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.validation import ServingLimits
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.clock import Clock
from kvtransfer.common.recent_map import RecentMap
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import Pooling
from workers.messages.link import Cancel, StepFrame

# Attempts that replicas were told to stop, so that none is told twice.
_NUM_STALE = 1024
_NOBODY = Caller()
# Characters of the id and the tenant of a refused request, which may be of any length.
_MAX_LOGGED_CHARS = 128

_log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")


class RequestHandle(NamedTuple):
    """A running request, as the call that started it sees it: `task` yields the output."""

    task: RequestTask
    request_id: str
    seed: int
    num_prompt_tokens: int
    resume_token: str


class RequestManager:
    """All requests of a gateway.

    Replicas know a request by its id on the wire, which is new for every call. Clients know it by their own
    id: tenant and id find the request (`record`), and the call that a new one resumes.
    """

    def __init__(
        self,
        acceptance: Acceptance,
        *,
        connections: ReplicaConnections,
        router: Router,
        clock: Clock,
        max_unread_mb: float,
        on_members: Callable[[], None],
        counters: GatewayCounters,
        relatives: PromptRelatives,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.acceptance = acceptance
        self.admission = acceptance.admission
        self.counters = counters
        self._relatives = relatives
        self.unread = UnreadOutput(max_unread_mb * 1e6, WriteTurns(WritePause(clock), clock))
        self._running = acceptance.running
        self.charges = acceptance.charges
        self._connections = connections
        self._router = router
        self._clock = clock
        self._members_changed = on_members
        self._observers = (counters.ended, *observers)
        # Does work on many requests without blocking the event loop.
        self._slices = LoopSlices()
        self._records = RequestRecords(self._running.latest)
        self._stale: RecentMap[tuple[ReplicaIdentity, str, int], None] = RecentMap(_NUM_STALE)

    @property
    def resumed(self) -> ResumedCalls:
        """The record of the calls that may be resumed free of charge."""
        return self.acceptance.resumes.resumed

    @property
    def num_running(self) -> int:
        return len(self._running)

    def limits(self) -> ServingLimits:
        """As `Acceptance.limits`."""
        return self.acceptance.limits()

    async def accept(
        self,
        request: pb.GenerateRequest,
        deadline_s: float | None,
        identity: Identity,
        caller: Caller = _NOBODY,
        pooling: Pooling | None = None,
        *,
        is_charged: bool = False,
    ) -> RequestHandle:
        """Accept the request and start its task. Raises `RequestError` if the request is refused.

        `deadline_s` is the rest of the client's deadline (None: there is none); the rest as in `NewCall`.
        """
        now = self._clock.now()
        deadline_at = None if deadline_s is None else now + deadline_s
        call = NewCall(request, identity, caller, now, deadline_at, CallProgress(), pooling, is_charged)
        try:
            accepted = await self.acceptance.accept(call)
        except RequestError as error:
            self._observe_refused(call, error)
            raise
        with accepted.queued.closed_on_failure():
            task = self._begin(accepted)
        prepared = accepted.prepared
        return RequestHandle(
            task, accepted.key[1], prepared.seed, prepared.num_prompt_tokens, accepted.resume_token
        )

    def _observe_refused(self, call: NewCall, error: RequestError) -> None:
        self._observe(
            EndedRequest(
                request_id=call.request.request_id[:_MAX_LOGGED_CHARS],
                wire_id="",
                tenant=call.tenant[:_MAX_LOGGED_CHARS],
                caller=call.caller,
                state="refused",
                code=to_grpc_status(error).code.name,
                reason=error.logged,
                started_at=call.caller.arrived_at or call.arrived_at,
                ended_at=self._clock.now(),
                prepared=call.progress.prepared,
                service_class=call.progress.service_class,
                max_tokens=call.request.max_tokens,
            )
        )

    def record(self, request_id: str, tenant: str | None) -> RequestInfo:
        """As `RequestRecords.find`."""
        return self._records.find(request_id, tenant)

    def latest(self, limit: int, tenant: str | None) -> list[RequestInfo]:
        """As `RequestRecords.latest`."""
        return self._records.latest(limit, tenant)

    def leave(self) -> None:
        """Accept no more requests. Those that run continue."""
        self.acceptance.leave()

    async def close(self) -> None:
        """Accept no more requests, and end those that run with UNAVAILABLE: clients resume at another
        gateway."""
        self.leave()
        error = UnavailableError("this gateway is stopping", 0.0)
        self._slices.add(partial(task.abandon, error) for task in list(self._running.tasks.values()))
        await self._slices.done()

    # -------------------------------------------------------------- from the connections to replicas

    def on_step(self, source: ReplicaIdentity, frame: StepFrame) -> None:
        """Pass each request its part of the frame: the prompt and the hand-over before the tokens after them,
        and failures behind all output."""
        now = self._clock.now()
        self._judge(source, frame, now)
        for report in frame.prefills:
            if (task := self._current(source, report.request_id, report.attempt)) is not None:
                self.counters.prefilled(report, source.replica_id, now)
                task.apply(task.state.on_prefilled, report)
        for joined in frame.hand_overs:
            if (task := self._current(source, joined.request_id, joined.attempt)) is not None:
                task.apply(task.state.on_handed_over, source, joined)
        for part in frame.prompt_logprobs:
            if (task := self._current(source, part.request_id, part.attempt)) is not None:
                task.apply(task.state.on_prompt_logprobs, source, part)
        for delta in frame.deltas:
            if (task := self._current(source, delta.request_id, delta.attempt)) is not None:
                self.counters.streamed(source.replica_id, delta, now)
                num_tokens = len(delta.tokens) // TOKEN_BYTES
                self.charges.quotas.produced(task.state.prepared.facts.tenant, num_tokens, now)
                task.apply(task.state.on_delta, source, delta)
        for embedding in frame.embeddings:
            if (task := self._current(source, embedding.request_id, embedding.attempt)) is not None:
                task.apply(task.state.on_embedding, source, embedding)
        for isolated in frame.isolations:
            if (task := self._running.tasks.get(isolated.request_id)) is not None:
                task.apply(task.state.on_isolated, source, isolated)
        for stalled in frame.stalls:
            if (task := self._running.tasks.get(stalled.request_id)) is not None:
                task.apply(task.state.on_stalled, source, stalled)
        for failure in frame.failures:
            if (task := self._running.tasks.get(failure.request_id)) is not None:
                self.counters.attempt_failed(source.replica_id, failure.code, now)
                if failure.code == "refused":
                    self._router.on_refused(failure.refused_by or source.replica_id)
                task.apply(task.state.on_failed, source, failure)
        for ended in frame.moves:
            if (task := self._running.tasks.get(ended.request_id)) is not None:
                task.apply(task.state.on_move_ended, source, ended)
        if may_free_capacity(frame):
            self.admission.pump(source.replica_id)

    def _judge(self, source: ReplicaIdentity, frame: StepFrame, now: float) -> None:
        """Report successes, and failures that are the replica's own fault, to its circuit breaker."""
        breakers = self._connections.breakers
        for prefilled in frame.prefills:
            breakers.succeeded(source, prefilled.request_id, now)
        for joined in frame.hand_overs:
            breakers.succeeded(source, joined.request_id, now)
        for failure in frame.failures:
            if failure.code == "internal" and not failure.suspect:
                breakers.failed(source, failure.request_id, failure.reason, now)

    def on_stopped(self, source: ReplicaIdentity, reason: str, includes_streams: bool) -> None:
        """Let requests without a token leave a replica that stands still; with `includes_streams`, streams
        too."""
        self._tell_all_at(source, RequestState.on_stopped, source, reason, includes_streams)

    def on_breaker(self, source: ReplicaIdentity, breaker: CircuitBreaker) -> None:
        """Count a change of a circuit breaker's state. When the breaker opens, requests that wait for the
        replica wait for others instead."""
        self.counters.breaker_changed(self._connections.pool_of(source.replica_id), str(breaker.state))
        if breaker.state is BreakerState.OPEN:
            self.admission.leave(source.replica_id)

    def on_lost(self, source: ReplicaIdentity, reason: str) -> None:
        """Let the requests at a replica whose Link has ended, and those that wait for it, go to others."""
        view = self._connections.find(source.replica_id)
        if view is not None and not view.record.leaving:
            self.counters.lost(view.record.pool)
        self.admission.leave(source.replica_id)
        self._tell_all_at(source, RequestState.on_lost, source, reason)

    def on_streams(self, source: ReplicaIdentity, may_stay: bool) -> None:
        """Tell every request that streams must leave this replica, or may stay there after all."""
        if not may_stay:
            self.admission.leave(source.replica_id)
        tasks = sorted(self._running.tasks.values(), key=lambda task: not task.state.is_at(source))
        self._slices.add(partial(task.apply, task.state.on_streams, source, may_stay) for task in tasks)

    def _tell_all_at(
        self,
        replica: ReplicaIdentity,
        transition: Callable[[RequestState, *Args, float], None],
        *args: *Args,
    ) -> None:
        """Run a transition of each request whose running attempt is at this replica. A request that has begun
        another attempt by its turn is left out."""

        def tell(task: RequestTask, attempt: int) -> None:
            if task.state.attempt == attempt:
                task.apply(lambda now: transition(task.state, *args, now))

        tasks = [task for task in self._running.tasks.values() if task.state.is_at(replica)]
        self._slices.add(partial(tell, task, task.state.attempt) for task in tasks)

    def on_members(self) -> None:
        """React to replicas that joined, left or changed their role: limits and capacity may differ now."""
        self._members_changed()
        self.admission.pump()

    def _current(self, source: ReplicaIdentity, request_id: str, attempt: int) -> RequestTask | None:
        """Return the request whose running attempt this is. If there is none, tell the replica once to stop
        the attempt, and return None."""
        task = self._running.tasks.get(request_id)
        if task is not None and task.state.is_current(attempt):
            return task
        key = (source, request_id, attempt)
        if key not in self._stale:
            self._stale.put(key, None)
            self._connections.send(source, Cancel(request_id, attempt))
        return None

    # ------------------------------------------------------------------------------------ requests

    def _begin(self, accepted: AcceptedRequest) -> RequestTask:
        call, prepared, charge = accepted.call, accepted.prepared, accepted.charge

        def on_end(error: RequestError | None) -> None:
            try:
                was_refused = isinstance(error, OverloadedError) and not task.state.attempt
                if was_refused and not charge.is_free:
                    num_taken = prepared.num_prompt_tokens + prepared.num_claimed_tokens
                    self.charges.quotas.withdraw(prepared.facts.tenant, num_taken, self._clock.now())
                self.resumed.ended(
                    accepted.key,
                    None if was_refused and not charge.is_free else error,
                    num_before=prepared.num_resumed_tokens if charge.is_free and not was_refused else None,
                    num_tokens=task.state.num_output_tokens,
                )
            finally:
                self._end(accepted, task, error)

        relative = self._relatives.meet(prepared, accepted.key[1])
        task = RequestTask(
            RequestStart(prepared, accepted.texts, call.arrived_at, accepted.due_at, relative),
            accepted.queued,
            connections=self._connections,
            router=self._router,
            clock=self._clock,
            admission=self.admission,
            unread=self.unread,
            on_end=on_end,
        )
        self._running.add(accepted.key, task)
        with ended_by_faults(task):
            self.counters.arrived(prepared, call.arrived_at, accepted.queued.predicted)
            task.begin()
        return task

    def _end(self, accepted: AcceptedRequest, task: RequestTask, error: RequestError | None) -> None:
        request, key, now = task.state, accepted.key, self._clock.now()
        self._running.remove(key, task, now)
        reason = error.logged if error else ""
        if error is None:
            state = "finished"
        elif isinstance(error, AbandonedError):
            state = "cancelled"
        else:
            state = "failed"
            _log.info("request %s failed: %s", key[1], reason, extra={"request_id": key[1]})
        ended = EndedRequest(
            request_id=key[1],
            wire_id=accepted.prepared.request_id,
            tenant=accepted.prepared.facts.tenant,
            caller=accepted.call.caller,
            state=state,
            code=to_grpc_status(error).code.name if error else "OK",
            reason=reason,
            started_at=request.started_at,
            ended_at=now,
            summary=request.summary(now),
            decisions=tuple(request.decisions),
            timeline=tuple(request.timeline),
            prepared=accepted.prepared,
            service_class=accepted.prepared.facts.service_class,
            max_tokens=accepted.call.request.max_tokens,
            relative=task.relative,
        )
        self._records.ended(key, ended)
        self.admission.pump()
        self._observe(ended)

    def _observe(self, ended: EndedRequest) -> None:
        for observe in self._observers:
            with failures_logged(_log, "a request that has ended was not recorded"):
                observe(ended)
