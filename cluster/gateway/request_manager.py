"""The requests of one gateway: accepted here, run by a `RequestTask` each, remembered after the end.

`ReplicaConnections` report here what replicas send, and each request gets its part. The file is
over 600 lines because accepting requests, telling them what happens and remembering them share their tables.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVarTuple

from cluster.admission import read_budget
from cluster.admission.admission import RequestAdmission
from cluster.admission.fair_queue import Flow
from cluster.admission.held import Candidacy, HeldRequest
from cluster.admission.queued_bytes import ByteHold
from cluster.admission.quotas import QuotaHold, Quotas
from cluster.admission.refusal_pace import RefusalPace
from cluster.admission.retries import EndRate
from cluster.errors import (
    AbandonedError,
    DeadlineError,
    DuplicateRequestError,
    OverloadedError,
    QuotaError,
    RequestError,
    UnavailableError,
    failures_logged,
    to_grpc_status,
)
from cluster.gateway.circuit_breaker import BreakerState, CircuitBreaker
from cluster.gateway.loop_slices import LoopSlices
from cluster.gateway.output_buffer import UnreadOutput
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.gateway.request_records import RequestRecords
from cluster.gateway.request_state import RequestState
from cluster.gateway.request_task import RequestTask, Router, ended_by_faults
from cluster.gateway.resume_charges import Charge, ResumeCharges
from cluster.gateway.resumed_calls import RequestKey, ResumedCalls
from cluster.gateway.submissions import first_route_request
from cluster.gateway.tenant_terms import TenantTerms
from cluster.identity.config import AuthConfig
from cluster.identity.identity import Identity
from cluster.identity.resume_tokens import draw_request_id, resume_digest
from cluster.metrics.ended_request import Caller, EndedRequest, Observer, RequestInfo
from cluster.metrics.gateway_counters import NOT_PREDICTED, GatewayCounters
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.preprocess import PreparedRequest, Preprocessor
from cluster.text.sample_text import SampleText
from cluster.text.validation import ServingLimits, check_request
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity
from router.errors import NoReplicaError
from workers.messages.link import Cancel, Pooling, ServiceClass, StepFrame
from workers.messages.sampling import SamplingParams

_NUM_STALE = 1024
_NOBODY = Caller()
# Of the id and the tenant of a refused request, which may be of any length.
_MAX_LOGGED_CHARS = 128

_log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")


class Accepted(NamedTuple):
    """A running request."""

    task: RequestTask
    request_id: str
    seed: int
    num_prompt_tokens: int
    resume_token: str


class RequestManager:
    """All requests of a gateway.

    A request is kept by its id on the wire, which is new for every call; by its tenant and the client's own
    id it can be found (`record`) and, when the same caller calls again to resume it, taken over.
    """

    def __init__(
        self,
        *,
        preprocessor: Preprocessor,
        connections: ReplicaConnections,
        router: Router,
        clock: Clock,
        max_requests: int,
        max_unread_mb: float,
        on_members: Callable[[], None],
        counters: GatewayCounters,
        gateway_id: str,
        auth: AuthConfig,
        quotas: Quotas,
        resumes: ResumeCharges,
        admission: RequestAdmission,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.admission = admission
        self._gateway_id = gateway_id
        self._auth = auth
        self._terms = TenantTerms(auth)
        self._quotas = quotas
        self._refusals = RefusalPace()
        self._resumes = resumes
        self._preprocessor = preprocessor
        self._connections = connections
        self._router = router
        self._clock = clock
        self._max_requests = max_requests
        self.unread = UnreadOutput(max_unread_mb * 1e6)
        self._members_changed = on_members
        self._observers = (counters.ended, *observers)
        self.counters = counters
        self._tasks: dict[str, RequestTask] = {}
        # What is done for many requests at once.
        self._slices = LoopSlices()
        # Running.
        self._latest: dict[RequestKey, RequestTask] = {}
        self._records = RequestRecords(self._latest)
        self._stale: OrderedDict[tuple[ReplicaIdentity, str, int], None] = OrderedDict()
        self._ends = EndRate(clock.now())
        self._num_arriving = 0
        self._is_leaving = False

    @property
    def resumed(self) -> ResumedCalls:
        """What this gateway knows of calls that may be resumed free of charge."""
        return self._resumes.resumed

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def limits(self) -> ServingLimits:
        """Return what a request may ask for now."""
        return self._preprocessor.limits(self._connections.max_context_tokens)

    async def charge(self, tenant: str, count: int = 1) -> None:
        """Take the requests of a call from its tenant's quota, before anything of it is done; raise
        `QuotaError` where there are not so many. Prompts are accepted with `is_charged` then. What was taken
        when the reading of the call began is one of them."""
        now = self._clock.now()
        if read_budget.use_paid():
            self._quotas.withdraw(tenant, 0, now)
        try:
            self._quotas.admit(tenant, now, count)
        except QuotaError as error:
            self.counters.over_quota(tenant, error.limit)
            await self.pace_refusal(tenant)
            raise

    async def pace_refusal(self, tenant: str) -> None:
        """Wait before a call is refused by its tenant's quota, if others were refused just before."""
        if delay_s := self._refusals.delay_s(tenant, self._clock.now()):
            await self._clock.sleep(delay_s)

    def give_back_requests(self, tenant: str, count: int = 1) -> None:
        """Give requests back that were taken before they were accepted: another application answers them, and
        charges for them, or this gateway has too much to do for them."""
        self._quotas.withdraw(tenant, 0, self._clock.now(), count)

    async def accept(
        self,
        request: pb.GenerateRequest,
        deadline_s: float | None,
        identity: Identity,
        caller: Caller = _NOBODY,
        pooling: Pooling | None = None,
        *,
        is_charged: bool = False,
    ) -> Accepted:
        """Check, tokenize and start the request; raise the `RequestError` that says why it cannot be.

        The request is the identity's already (`cluster.api.authentication.claim`). `deadline_s` is what
        remains of the client's deadline (None: none). With `pooling` its prompt is embedded, and nothing is
        generated. `is_charged`: it was taken from its tenant's requests before, with others.
        """
        now = self._clock.now()
        try:
            return await self._accept(request, deadline_s, identity, caller, now, pooling, is_charged)
        except RequestError as error:
            if isinstance(error, QuotaError):
                self.counters.over_quota(request.tenant, error.limit)
                await self.pace_refusal(request.tenant)
            self._observe(
                EndedRequest(
                    request_id=request.request_id[:_MAX_LOGGED_CHARS],
                    wire_id="",
                    tenant=request.tenant[:_MAX_LOGGED_CHARS],
                    caller=caller,
                    state="refused",
                    code=to_grpc_status(error).code.name,
                    reason=error.logged,
                    started_at=caller.arrived_at or now,
                    ended_at=self._clock.now(),
                )
            )
            raise

    async def _accept(
        self,
        request: pb.GenerateRequest,
        deadline_s: float | None,
        identity: Identity,
        caller: Caller,
        now: float,
        pooling: Pooling | None,
        is_charged: bool,
    ) -> Accepted:
        limits = self.limits()
        check_request(request, limits)
        identity.check_may_use(limits.model_name)
        flow = Flow(request.tenant, self._terms.service_class(request, identity))
        weight = self._auth.limits(request.tenant).weight
        candidate = Candidacy(
            flow, weight, request.priority, now, None if deadline_s is None else now + deadline_s
        )
        is_charged = read_budget.use_paid() or is_charged
        try:
            charge = await self._charge(request, identity, candidate, is_charged)
        except OverloadedError:
            if is_charged:
                self._quotas.withdraw(request.tenant, 0, now)
            raise
        try:
            return await self._start(request, limits, identity, caller, candidate, pooling, charge)
        except (OverloadedError, QuotaError, UnavailableError) as error:
            if charge.grant is not None:
                await self.resumed.give_back(charge.grant)
            elif isinstance(error, UnavailableError):  # the caller goes to another gateway
                self._quotas.withdraw(request.tenant, 0, now)
            raise

    async def _charge(
        self, request: pb.GenerateRequest, identity: Identity, candidate: Candidacy, is_charged: bool
    ) -> Charge:
        """Take one request from the tenant's quota, unless that was done, or the call is free."""
        now, tenant = candidate.arrived_at, request.tenant
        if not request.resume:
            self._check_early(candidate, request.ByteSize())
            if not is_charged:
                self._quotas.admit(tenant, now)
            return Charge(resume_digest(request))
        # They all come at once when another gateway ends.
        self._check_num(candidate, 2 * self._max_requests)
        charge = await self._resumes.charge(request, identity, now)
        if not charge.is_free:
            older = self._latest.get((tenant, request.request_id))
            if older is None or older.waiting_since is None:
                self._check_early(candidate, request.ByteSize())
            if not is_charged:
                self._quotas.admit(tenant, now)
        elif is_charged:  # when its body was read
            self._quotas.withdraw(tenant, 0, now)
        return charge

    def _check_early(self, candidate: Candidacy, num_bytes: int) -> None:
        """Raise `OverloadedError` where a new request is refused before it costs anything."""
        self._check_num(candidate, self._max_requests)
        self.admission.check_early(
            candidate.flow, candidate.weight, candidate.arrived_at, candidate.deadline_at, num_bytes
        )

    def _check_num(self, candidate: Candidacy, most: int) -> None:
        if len(self._tasks) + self._num_arriving >= most:
            because = f"this gateway has {most} requests, the most it takes (gateway.max_requests)"
            self.admission.refuse(
                "requests", candidate.flow, because, self._ends.next_s(candidate.arrived_at)
            )

    async def _start(
        self,
        request: pb.GenerateRequest,
        limits: ServingLimits,
        identity: Identity,
        caller: Caller,
        candidate: Candidacy,
        pooling: Pooling | None,
        charge: Charge,
    ) -> Accepted:
        """Tokenize and start a request that was charged, or is free."""
        deadline_at, service_class = candidate.deadline_at, candidate.flow.service_class
        num_bytes = request.ByteSize()
        request_id = request.request_id or draw_request_id(self._gateway_id)
        self._num_arriving += 1
        try:
            with self.admission.queued.hold(num_bytes):
                prepared, texts = await self._prepare(
                    request, request_id, limits, identity, deadline_at, service_class
                )
        finally:
            self._num_arriving -= 1
        if self._is_leaving:
            raise UnavailableError("this gateway is stopping", 0.0)
        if pooling is not None:
            prepared = replace(prepared, pooling=pooling, sampling=SamplingParams(max_tokens=1))
        if deadline_at is not None and deadline_at <= self._clock.now():
            raise DeadlineError("the deadline passed before the request was accepted")
        key = request.tenant, request_id
        if key in self._latest and not request.resume:
            raise DuplicateRequestError(f"request {request_id!r} is running; choose another id, or resume it")
        candidacy: Candidacy | None = candidate
        cap = charge.capped_max_tokens
        if request.resume:
            candidacy = self._take_over(key, request, candidate, charge)
        else:
            cap = self.admission.max_tokens(service_class, prepared.sampling.max_tokens)
        is_cut = 0 < cap < prepared.sampling.max_tokens
        prepared = prepared.capped(cap)
        queued = self.admission.queued.hold(num_bytes + prepared.num_bytes)
        held, quota_hold = self._admit(prepared, candidacy, queued, charge)
        if is_cut and not request.resume:
            self.admission.counts.num_capped += 1
        task = self._begin(
            key, prepared, texts, caller, candidate, candidacy, held, quota_hold, queued, charge
        )
        with ended_by_faults(task):
            token = self._resumes.tokens.issue(
                identity, request.tenant, request_id, prepared.seed, charge.digest, prepared.capped_max_tokens
            )
        return Accepted(task, request_id, prepared.seed, prepared.num_prompt_tokens, token)

    async def _prepare(
        self,
        request: pb.GenerateRequest,
        request_id: str,
        limits: ServingLimits,
        identity: Identity,
        deadline_at: float | None,
        service_class: ServiceClass,
    ) -> tuple[PreparedRequest, Sequence[SampleText]]:
        """Tokenize the prompt, and write what the output must be as a grammar."""
        prompt = await self._preprocessor.prompt_tokens(request, limits)
        grammar = await self._preprocessor.grammar(request, prompt)
        compatibility = self._connections.compatibility
        if compatibility is None:
            raise UnavailableError("no replica has connected to this gateway yet")
        group = self._terms.sharing_group(identity, request.tenant)
        return await self._preprocessor.prepare(
            request,
            prompt,
            self._terms.within_share(
                limits, group, self._connections.min_kv_blocks, compatibility.block_tokens
            ),
            request_id=request_id,
            sharing_group=group,
            fingerprint=compatibility.model_fingerprint,
            deadline_at=deadline_at,
            service_class=service_class,
            grammar=grammar,
        )

    def _take_over(
        self, key: RequestKey, request: pb.GenerateRequest, candidacy: Candidacy, charge: Charge
    ) -> Candidacy | None:
        """End the call that this one resumes, if it runs here. Returns what admission must know.

        A call that waits here leaves its place to this one, which adds no load, and would pass the others if
        it got a better one. Another call that is charged is judged as a new one. One that is free was judged
        before: with output it goes on before all that wait (None), without any it waits for its turn.
        """
        older = self._latest.get(key)
        since = None
        if older is not None:
            since = older.waiting_since
            older.abandon(AbandonedError("taken over by a call that resumes it"))
        if since is not None:
            return candidacy._replace(arrived_at=since, is_accepted=True)
        if not charge.is_free:
            return candidacy
        has_output = any(it.token_ids for it in request.resume)
        return None if has_output else candidacy._replace(is_accepted=True)

    def _admit(
        self, prepared: PreparedRequest, candidacy: Candidacy | None, queued: ByteHold, charge: Charge
    ) -> tuple[HeldRequest | None, QuotaHold]:
        """Find a place for a new request, and take its prompt from its tenant's quota. A request without a
        place is held by nobody: where no replica is there, its task asks again."""
        max_tokens = prepared.sampling.max_tokens * len(prepared.samples)
        # The output that a caller claims is computed like a prompt, and part of `max_tokens`.
        num_claimed = 0 if charge.is_free else prepared.num_claimed_tokens
        held = None
        with contextlib.ExitStack() as failed:
            failed.callback(queued.release)
            if candidacy is not None:
                held = self._place(prepared, candidacy, charge)
            if held is not None:
                failed.callback(self.admission.drop, held)
            quota_hold = self._quotas.take_prompt(
                prepared.tenant,
                prepared.num_prompt_tokens + num_claimed,
                max_tokens - num_claimed,
                self._clock.now(),
                is_free=charge.is_free,
                moved=charge.moved,
            )
            failed.pop_all()
        return held, quota_hold

    def _place(self, prepared: PreparedRequest, candidacy: Candidacy, charge: Charge) -> HeldRequest | None:
        try:
            return self.admission.admit(first_route_request(prepared), candidacy)
        except NoReplicaError:
            return None
        except RequestError:
            if not charge.is_free:
                self._quotas.withdraw(prepared.tenant, 0, self._clock.now())
            raise

    def record(self, request_id: str, tenant: str | None) -> RequestInfo:
        """As `RequestRecords.find`."""
        return self._records.find(request_id, tenant)

    def latest(self, limit: int, tenant: str | None) -> list[RequestInfo]:
        """As `RequestRecords.latest`."""
        return self._records.latest(limit, tenant)

    def leave(self) -> None:
        """Accept no more requests; those that run continue."""
        self._is_leaving = True

    async def close(self) -> None:
        """End every request with UNAVAILABLE, so that clients resume at another gateway; accept none."""
        self.leave()
        error = UnavailableError("this gateway is stopping", 0.0)
        self._slices.add(partial(task.abandon, error) for task in list(self._tasks.values()))
        await self._slices.done()

    # -------------------------------------------------------------- from the connections to replicas

    def on_step(self, source: ReplicaIdentity, frame: StepFrame) -> None:
        """Pass each request its part, in the order in which that matters within a step."""
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
                self._quotas.produced(task.state.prepared.tenant, num_tokens, now)
                task.apply(task.state.on_delta, source, delta)
        for embedding in frame.embeddings:
            if (task := self._current(source, embedding.request_id, embedding.attempt)) is not None:
                task.apply(task.state.on_embedding, source, embedding)
        for isolated in frame.isolations:
            if (task := self._tasks.get(isolated.request_id)) is not None:
                task.apply(task.state.on_isolated, source, isolated)
        for stalled in frame.stalls:
            if (task := self._tasks.get(stalled.request_id)) is not None:
                task.apply(task.state.on_stalled, source, stalled)
        for failure in frame.failures:
            if (task := self._tasks.get(failure.request_id)) is not None:
                self.counters.attempt_failed(source.replica_id, failure.code, now)
                if failure.code == "refused":
                    self._router.on_refused(failure.refused_by or source.replica_id)
                task.apply(task.state.on_failed, source, failure)
        for ended in frame.moves:
            if (task := self._tasks.get(ended.request_id)) is not None:
                task.apply(task.state.on_move_ended, source, ended)
        self.admission.pump(source.replica_id)

    def _judge(self, source: ReplicaIdentity, frame: StepFrame, now: float) -> None:
        """Let the replica's circuit breaker know what succeeded there, and what failed by its own fault."""
        breakers = self._connections.breakers
        for prefilled in frame.prefills:
            breakers.succeeded(source, prefilled.request_id, now)
        for joined in frame.hand_overs:
            breakers.succeeded(source, joined.request_id, now)
        for failure in frame.failures:
            if failure.code == "internal" and not failure.suspect:
                breakers.failed(source, failure.request_id, failure.reason, now)

    def on_stopped(self, source: ReplicaIdentity, reason: str, includes_streams: bool) -> None:
        """Let requests without a token leave a replica that stands still, and streams too where that is
        said."""
        self._tell_all_at(source, RequestState.on_stopped, source, reason, includes_streams)

    def on_breaker(self, source: ReplicaIdentity, breaker: CircuitBreaker) -> None:
        """Count a change of a circuit breaker's state. What waits for a replica that is avoided from now on
        waits for others."""
        self.counters.breaker_changed(self._connections.pool_of(source.replica_id), str(breaker.state))
        if breaker.state is BreakerState.OPEN:
            self.admission.leave(source.replica_id)

    def on_lost(self, source: ReplicaIdentity, reason: str) -> None:
        """Report to every request that a replica is lost."""
        view = self._connections.find(source.replica_id)
        if view is not None and not view.record.leaving:
            self.counters.lost(view.record.pool)
        self.admission.leave(source.replica_id)
        self._tell_all_at(source, RequestState.on_lost, source, reason)

    def on_streams(self, source: ReplicaIdentity, may_stay: bool) -> None:
        """Report to every request that streams must leave this replica, or may stay there after all."""
        if not may_stay:
            self.admission.leave(source.replica_id)
        tasks = sorted(self._tasks.values(), key=lambda task: not task.state.is_at(source))
        self._slices.add(partial(task.apply, task.state.on_streams, source, may_stay) for task in tasks)

    def _tell_all_at(
        self,
        replica: ReplicaIdentity,
        transition: Callable[[RequestState, *Args, float], None],
        *args: *Args,
    ) -> None:
        """Run a transition of each request whose running attempt is at this replica, unless another attempt
        has begun when its turn comes."""

        def tell(task: RequestTask, attempt: int) -> None:
            if task.state.attempt == attempt:
                task.apply(lambda now: transition(task.state, *args, now))

        tasks = [task for task in self._tasks.values() if task.state.is_at(replica)]
        self._slices.add(partial(tell, task, task.state.attempt) for task in tasks)

    def on_members(self) -> None:
        """Report that what can be served may have changed."""
        self._members_changed()
        self.admission.pump()

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
        key: RequestKey,
        prepared: PreparedRequest,
        texts: Sequence[SampleText],
        caller: Caller,
        candidate: Candidacy,
        candidacy: Candidacy | None,
        held: HeldRequest | None,
        quota_hold: QuotaHold,
        queued: ByteHold,
        charge: Charge,
    ) -> RequestTask:
        now = candidate.arrived_at

        def on_end(error: RequestError | None) -> None:
            try:
                self._quotas.ended(quota_hold)
                was_refused = isinstance(error, OverloadedError) and not task.state.attempt
                if was_refused and not charge.is_free:
                    num_taken = prepared.num_prompt_tokens + prepared.num_claimed_tokens
                    self._quotas.withdraw(prepared.tenant, num_taken, self._clock.now())
                self.resumed.ended(
                    key,
                    None if was_refused and not charge.is_free else error,
                    num_before=prepared.num_resumed_tokens if charge.is_free and not was_refused else None,
                    num_tokens=task.state.num_output_tokens,
                )
            finally:
                self._end(key, task, error, caller)

        task = RequestTask(
            prepared,
            texts,
            connections=self._connections,
            router=self._router,
            clock=self._clock,
            on_end=on_end,
            started_at=now,
            admission=self.admission,
            candidacy=candidacy,
            held=held,
            queued=queued,
            due_at=now + self.admission.aging_s(prepared.service_class),
            unread=self.unread,
        )
        self._tasks[prepared.request_id] = self._latest[key] = task
        with ended_by_faults(task):
            self.counters.arrived(prepared, now, NOT_PREDICTED if held is None else held.predicted)
            task.begin()
        return task

    def _end(self, key: RequestKey, task: RequestTask, error: RequestError | None, caller: Caller) -> None:
        request, prepared = task.state, task.state.prepared
        request_id = key[1]
        del self._tasks[prepared.request_id]
        if self._latest.get(key) is task:
            del self._latest[key]
        reason = error.logged if error else ""
        if error is None:
            state = "finished"
        elif isinstance(error, AbandonedError):
            state = "cancelled"
        else:
            state = "failed"
            _log.info("request %s failed: %s", request_id, reason, extra={"request_id": request_id})
        now = self._clock.now()
        self._ends.add(now)
        self._records.ended(key, task, state, reason, now)
        self.admission.pump()
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
            with failures_logged(_log, "a request that has ended was not recorded"):
                observe(ended)
