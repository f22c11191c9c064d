"""Accept a request: check it, charge its tenant, prepare it, and put it into a queue of admission."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from cluster.admission import read_budget
from cluster.admission.admission import RequestAdmission
from cluster.admission.flow import Flow
from cluster.admission.queued_request import QueuedRequest
from cluster.errors import (
    AbandonedError,
    DeadlineError,
    DuplicateRequestError,
    OverloadedError,
    QuotaError,
    RequestError,
    UnavailableError,
)
from cluster.gateway.call_charges import CallCharges
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.gateway.resume_charges import Charge, ResumeCharges
from cluster.gateway.resumed_calls import RequestKey
from cluster.gateway.running_requests import RunningRequests
from cluster.gateway.submissions import first_route_request
from cluster.gateway.tenant_terms import TenantTerms
from cluster.identity.identity import Identity
from cluster.identity.resume_tokens import resume_digest
from cluster.metrics.ended_request import Caller
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.preprocess import PreparedRequest, Preprocessor
from cluster.text.sample_text import SampleText
from cluster.text.validation import ServingLimits, check_request
from kvtransfer.common.clock import Clock
from kvtransfer.request_facts import Pooling, ServiceClass
from router.errors import NoReplicaError


class CallProgress:
    """How far a call came that may be refused."""

    __slots__ = ("prepared", "service_class")

    def __init__(self) -> None:
        # "": it was refused before it had a class.
        self.service_class: ServiceClass | Literal[""] = ""
        # None: it was refused before its prompt was tokenized.
        self.prepared: PreparedRequest | None = None


class NewCall(NamedTuple):
    """A call as it arrives. `request.tenant` is that of the identity already, whatever the client named
    (`cluster.api.authentication.claim`)."""

    request: pb.GenerateRequest
    identity: Identity
    caller: Caller
    # In monotonic seconds. `deadline_at` None: the client set no deadline.
    arrived_at: float
    deadline_at: float | None
    progress: CallProgress
    # If set, the prompt is embedded this way, and no token is generated.
    pooling: Pooling | None = None
    # Whether the tenant's bucket of requests was charged for this call before, together with others.
    is_charged: bool = False

    @property
    def tenant(self) -> str:
        """The tenant of the request."""
        return self.request.tenant


class AcceptedRequest(NamedTuple):
    """A request that will run, in as many attempts as it needs."""

    call: NewCall
    key: RequestKey
    prepared: PreparedRequest
    texts: Sequence[SampleText]
    queued: QueuedRequest
    charge: Charge
    # Replicas serve requests in order of this time, `aging_s` of the class after the arrival.
    due_at: float
    resume_token: str


class Acceptance:
    """Turns calls into accepted requests, or raises the `RequestError` that says why a call is refused.

    When a later step refuses a request, everything that the earlier steps took is given back: its bytes, its
    place in a queue and its concurrent tokens (`QueuedRequest.close`), the grant of a resumed call, and the
    charge, unless the tenant itself is the reason of the refusal.
    """

    def __init__(
        self,
        *,
        preprocessor: Preprocessor,
        connections: ReplicaConnections,
        admission: RequestAdmission,
        charges: CallCharges,
        resumes: ResumeCharges,
        terms: TenantTerms,
        running: RunningRequests,
        clock: Clock,
    ) -> None:
        self.admission = admission
        self.charges = charges
        self.resumes = resumes
        self.running = running
        self._preprocessor = preprocessor
        self._connections = connections
        self._terms = terms
        self._clock = clock
        self._is_leaving = False

    def limits(self) -> ServingLimits:
        """Return the limits that a request must keep now, by the replicas that are connected."""
        return self._preprocessor.limits(self._connections.max_context_tokens)

    def leave(self) -> None:
        """Accept no more requests."""
        self._is_leaving = True

    async def accept(self, call: NewCall) -> AcceptedRequest:
        """Check, charge, prepare and queue the request. Raises `RequestError` if it is refused."""
        limits = self.limits()
        check_request(call.request, limits)
        call.identity.check_may_use(limits.model_name)
        queued = self._queued_request(call)
        try:
            with queued.closed_on_failure():
                charge = await self._charge(call, queued)
                try:
                    return await self._prepare_and_place(call, queued, charge, limits)
                except (OverloadedError, QuotaError, UnavailableError) as error:
                    # First, since other gateways may be asked next: no request should wait behind this one.
                    queued.close()
                    await self._give_back(call, charge, error)
                    raise
        except QuotaError as error:
            await self.charges.refused(call.tenant, error)
            raise

    def _queued_request(self, call: NewCall) -> QueuedRequest:
        call.progress.service_class = self._terms.service_class(call.request, call.identity)
        flow = Flow(call.tenant, call.progress.service_class)
        weight = self._terms.weight(call.tenant)
        queued = QueuedRequest(
            "", flow, call.arrived_at, weight, call.request.priority, deadline_at=call.deadline_at
        )
        queued.on_close(self.admission.drop, queued)
        return queued

    async def _charge(self, call: NewCall, queued: QueuedRequest) -> Charge:
        """Take one request from the tenant's quota, unless that was done before, or the call is free. The
        number of running requests and the load may refuse the call before that."""
        request, now = call.request, call.arrived_at
        is_charged = read_budget.use_paid() or call.is_charged
        with self._withdrawn_on_overload(call.tenant, now) if is_charged else contextlib.nullcontext():
            if not request.resume:
                charge, waits_here = Charge(resume_digest(request)), False
            else:
                # When another gateway ends, its clients resume all their calls here at once.
                self.running.check_number(queued.flow, self.admission.refusals, now, factor=2)
                charge = await self.resumes.charge(request, call.identity, now)
                older = self.running.find((call.tenant, request.request_id))
                waits_here = older is not None and older.waiting_since is not None
            if not charge.is_free and not waits_here:
                self.running.check_number(queued.flow, self.admission.refusals, now)
                self.admission.checks.check_early(queued, request.ByteSize())
        if charge.is_free and is_charged:  # the charge was taken when the body was read
            self.charges.quotas.withdraw(call.tenant, 0, now)
        elif not charge.is_free and not is_charged:
            self.charges.quotas.admit(call.tenant, now)
        return charge

    @contextlib.contextmanager
    def _withdrawn_on_overload(self, tenant: str, now: float) -> Iterator[None]:
        try:
            yield
        except OverloadedError:
            self.charges.quotas.withdraw(tenant, 0, now)
            raise

    async def _give_back(self, call: NewCall, charge: Charge, error: RequestError) -> None:
        if charge.grant is not None:
            await self.resumes.resumed.give_back(charge.grant)
        elif isinstance(error, UnavailableError):  # the caller goes to another gateway
            self.charges.quotas.withdraw(call.tenant, 0, call.arrived_at)

    async def _prepare_and_place(
        self, call: NewCall, queued: QueuedRequest, charge: Charge, limits: ServingLimits
    ) -> AcceptedRequest:
        request, num_bytes = call.request, call.request.ByteSize()
        key = call.tenant, request.request_id or self.running.draw_id()
        self.admission.bytes.count(queued, num_bytes)
        with self.running.arriving():
            prepared, texts = await self._prepare(call, key, queued.flow.service_class, limits)
        call.progress.prepared = prepared
        queued.request_id = prepared.request_id
        self._check_still_wanted(call, key)
        cap = charge.capped_max_tokens
        if request.resume:
            self._take_over(call, key, queued, charge)
        else:
            cap = self.admission.degradation.max_tokens(
                queued.flow.service_class, prepared.sampling.max_tokens
            )
        is_cut = not request.resume and 0 < cap < prepared.sampling.max_tokens
        prepared = prepared.capped(cap)
        self.admission.bytes.count(queued, num_bytes + prepared.num_bytes)
        if not queued.goes_at_once:
            self._place(queued, prepared, charge)
        self._take_tokens(queued, prepared, charge)
        self.admission.degradation.num_capped += is_cut
        token = self.resumes.tokens.issue(
            call.identity, *key, prepared.seed, charge.digest, prepared.capped_max_tokens
        )
        due_at = call.arrived_at + self.admission.config.of(queued.flow.service_class).aging_s
        return AcceptedRequest(call, key, prepared, texts, queued, charge, due_at, token)

    async def _prepare(
        self, call: NewCall, key: RequestKey, service_class: ServiceClass, limits: ServingLimits
    ) -> tuple[PreparedRequest, Sequence[SampleText]]:
        compatibility = self._connections.compatibility
        if compatibility is None:
            raise UnavailableError("no replica has connected to this gateway yet")
        facts = self._terms.facts(call.request, call.identity, service_class, call.pooling)
        num_share_tokens = int(self._connections.min_kv_blocks * facts.kv_share) * compatibility.block_tokens
        return await self._preprocessor.prepare(
            call.request,
            limits.within_share(facts.kv_share, num_share_tokens),
            request_id=key[1],
            facts=facts,
            fingerprint=compatibility.model_fingerprint,
            deadline_at=call.deadline_at,
        )

    def _check_still_wanted(self, call: NewCall, key: RequestKey) -> None:
        """Raise the error of a request that must not begin any more: preparing it took time."""
        if self._is_leaving:
            raise UnavailableError("this gateway is stopping", 0.0)
        if call.deadline_at is not None and call.deadline_at <= self._clock.now():
            raise DeadlineError("the deadline passed before the request was accepted")
        if self.running.find(key) is not None and not call.request.resume:
            raise DuplicateRequestError(f"request {key[1]!r} is running; choose another id, or resume it")

    def _take_over(self, call: NewCall, key: RequestKey, queued: QueuedRequest, charge: Charge) -> None:
        """End the earlier call that this one resumes, if that call runs here.

        If the earlier call still waits for output here, this call takes over its arrival time: the load
        stays the same, and the call overtakes nobody. Any other call that is charged is judged like a new
        one. A call that is free was judged before: with output it is submitted at once, without output it
        waits for its turn.
        """
        since = None
        if (older := self.running.find(key)) is not None:
            since = older.waiting_since
            older.abandon(AbandonedError("taken over by a call that resumes it"))
        if since is not None:
            queued.arrived_at, queued.is_judged = since, True
        elif charge.is_free:
            queued.is_judged = True
            queued.goes_at_once = any(it.token_ids for it in call.request.resume)

    def _place(self, queued: QueuedRequest, prepared: PreparedRequest, charge: Charge) -> None:
        """Queue the request for a replica. If there is no replica, its task tries again."""
        try:
            with contextlib.suppress(NoReplicaError):
                self.admission.place(queued, first_route_request(prepared))
        except RequestError:
            if not charge.is_free:
                self.charges.quotas.withdraw(prepared.facts.tenant, 0, self._clock.now())
            raise

    def _take_tokens(self, queued: QueuedRequest, prepared: PreparedRequest, charge: Charge) -> None:
        """Take the prompt's tokens from the tenant's quota, and the concurrent tokens until the request
        ends."""
        # Output that the caller claims to have is computed like a prompt, and counts towards `max_tokens`.
        num_claimed = 0 if charge.is_free else prepared.num_claimed_tokens
        num_tokens = self.charges.quotas.take_prompt(
            prepared.facts.tenant,
            prepared.num_prompt_tokens + num_claimed,
            prepared.sampling.max_tokens * len(prepared.samples) - num_claimed,
            self._clock.now(),
            is_free=charge.is_free,
            moved=charge.moved,
        )
        queued.on_close(self.charges.quotas.end, prepared.facts.tenant, num_tokens)
