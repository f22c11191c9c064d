"""A simulated gateway: admission, router and requests are those that serve; its links are events."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Protocol

from cluster.admission.admission import RequestAdmission
from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.ladder import Rung
from cluster.admission.queued_request import QueuedRequest
from cluster.errors import OverloadedError, RequestError
from cluster.gateway.reported_load import may_free_capacity, routed_load, routed_queue
from cluster.gateway.request_task import RequestStart
from cluster.gateway.submissions import first_route_request
from cluster.simulation.gateway_figures import GatewayFigures
from cluster.simulation.simulated_call import CallRecord, CountedText, SimulatedCall, SimulatedRequest
from cluster.simulation.simulated_peers import NETWORK_S
from cluster.simulation.simulated_replica import SimulatedReplica
from cluster.simulation.virtual_time import EventQueue
from cluster.text.preprocess import PreparedRequest, SampleStart
from kvtransfer.blocks.keys import extend_keys
from kvtransfer.kv_events import KvEvents, KvSnapshot, KvSnapshotRequest
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.config import RouterConfig
from router.errors import NoReplicaError
from router.placements import PlacementObserver
from router.service import RouterService
from workers.messages.link import (
    GatewayKey,
    HandOverTarget,
    Leaving,
    LinkDown,
    LinkUp,
    PauseBatch,
    ReplicaHello,
    RequestFailed,
    RoleChanged,
    StepFrame,
)
from workers.messages.sampling import SamplingParams

_ROOT_KEY = b"simulated group."


class Replicas(Protocol):
    """The replicas of the cluster, as a gateway sees them."""

    def find(self, replica_id: str) -> SimulatedReplica | None:
        """Return the replica of this id that lives."""


class SimulatedGateway:
    """One gateway. It implements `cluster.gateway.request_task.Connections` for its calls."""

    def __init__(
        self,
        name: str,
        events: EventQueue,
        replicas: Replicas,
        *,
        admission: AdmissionConfig,
        router: RouterConfig,
        block_tokens: int,
        seed: int,
        holds_back: bool = True,
        observer: PlacementObserver | None = None,
    ) -> None:
        """Without `holds_back`, requests are routed and submitted as they arrive, whatever the load."""
        self.name = name
        self.key: GatewayKey = name, 1
        self._events = events
        self._clock = events.clock
        self._replicas = replicas
        self._block_tokens = block_tokens
        self._holds_back = holds_back
        self.router = RouterService(router, block_tokens, self._clock, seed, salt=name, observer=observer)
        self.rungs: list[tuple[float, Rung]] = []
        seeds = itertools.count(seed)
        self.admission = RequestAdmission(
            admission, self.router, self._clock, lambda: next(seeds), events.at, self._on_rung
        )
        self.figures = GatewayFigures()
        # How long requests wait for the first replica, where there may be none.
        self.start_patience_s = 0.0
        self._hellos: dict[ReplicaIdentity, ReplicaHello] = {}
        self._targets: dict[str, HandOverTarget] = {}
        self._calls: dict[str, SimulatedCall] = {}
        self._pauses_batch = False

    @property
    def num_running(self) -> int:
        """The requests that have arrived and not ended."""
        return len(self._calls)

    # ---------------------------------------------------------------------------------------- calls

    def arrive(
        self, request: SimulatedRequest, record: CallRecord, on_end: Callable[[CallRecord], None]
    ) -> None:
        """Take a request that arrives now; `on_end` is called when it has ended in any way."""
        now, flow = self._clock.now(), Flow(request.tenant, request.service_class)
        record.gateway = self.name
        queued = QueuedRequest(f"{self.name}-{record.number}", flow, now, weight=request.weight)
        queued.on_close(self.admission.drop, queued)
        try:
            with queued.closed_on_failure():
                self._accept(request, record, queued, on_end)
        except RequestError as error:
            _refused(record, error, now)
            on_end(record)

    def _accept(
        self,
        request: SimulatedRequest,
        record: CallRecord,
        queued: QueuedRequest,
        on_end: Callable[[CallRecord], None],
    ) -> None:
        """Do what `cluster.gateway.acceptance` does, without text and quotas."""
        now = self._clock.now()
        prepared = self._prepared(request, queued.request_id, record.number)
        if self._holds_back:
            self.admission.checks.check_early(queued, len(request.prompt))
            prepared = prepared.capped(
                self.admission.degradation.max_tokens(request.service_class, request.num_output)
            )
            record.num_output = prepared.sampling.max_tokens
            self.admission.bytes.count(queued, prepared.num_bytes)
            with contextlib.suppress(NoReplicaError):  # its call tries again
                self.admission.place(queued, first_route_request(prepared))
        else:
            queued.goes_at_once = queued.is_judged = True
        due_at = now + self.admission.config.of(request.service_class).aging_s
        call = SimulatedCall(
            RequestStart(prepared, (CountedText(),), now, due_at),
            queued,
            self._events,
            connections=self,
            router=self.router,
            admission=self.admission,
            on_end=lambda error: self._on_end(queued.request_id, record, error, on_end),
        )
        self._calls[queued.request_id] = call
        self.figures.arrived(queued.request_id, now)
        call.begin()

    def _prepared(self, request: SimulatedRequest, request_id: str, number: int) -> PreparedRequest:
        group = _ROOT_KEY
        return PreparedRequest(
            request_id=request_id,
            facts=RequestFacts(tenant=request.tenant, service_class=request.service_class),
            prompt=request.prompt,
            root_key=group,
            block_keys=extend_keys(group, request.prompt, self._block_tokens),
            sampling=SamplingParams(max_tokens=request.num_output, ignore_eos=True),
            samples=(SampleStart(0, number + 1),),
            deadline_at=None,
        ).waiting_for_start(self.start_patience_s)

    def _on_end(
        self,
        request_id: str,
        record: CallRecord,
        error: RequestError | None,
        on_end: Callable[[CallRecord], None],
    ) -> None:
        now, call = self._clock.now(), self._calls.pop(request_id)
        self.figures.ended(request_id)
        summary = call.summary()
        record.first_token_at = summary.first_token_at or None
        record.num_attempts, record.num_moves = summary.num_attempts, summary.num_moves
        record.prefill, record.decode = summary.prefill_replica, summary.decode_replica
        record.num_cached = summary.prefill.num_cached_tokens if summary.prefill else 0
        if error is None:
            record.ended_at = now
        else:
            _refused(record, error, now)
        self.admission.pump()
        on_end(record)

    # ---------------------------------------------------------------- connections, as calls see them

    def target(self, replica_id: str) -> HandOverTarget | None:
        return self._targets.get(replica_id)

    def send(self, replica: ReplicaIdentity, message: LinkDown) -> bool:
        if replica not in self._hellos:
            return False
        self._post(replica, message)
        return True

    def release(self, request_id: str) -> None:
        """No circuit breaker asks for it."""

    def _post(self, identity: ReplicaIdentity, message: LinkDown) -> None:
        replica = self._replicas.find(identity.replica_id)
        if replica is not None and replica.identity == identity:
            self._events.after(NETWORK_S, lambda: replica.receive(self.key, message))

    # ------------------------------------------------------------------------------------- replicas

    def join(self, replica: SimulatedReplica) -> None:
        """Open the link to a replica that is ready."""
        replica.connect(self.key, partial(self._on_message, replica.identity), self.figures)

    def lost(self, identity: ReplicaIdentity, reason: str) -> None:
        """Take in that a replica's link has ended: its requests go to others."""
        if self._hellos.pop(identity, None) is None:
            return
        del self._targets[identity.replica_id]
        self.figures.lost(identity.replica_id)
        self.router.remove_replica(identity.replica_id)
        self.admission.leave(identity.replica_id)
        for call in list(self._calls.values()):
            if call.state.is_at(identity):
                call.apply(call.state.on_lost, identity, reason)
        self.admission.pump()

    def _on_message(self, source: ReplicaIdentity, message: LinkUp) -> None:
        if source not in self._hellos:
            if isinstance(message, ReplicaHello):
                self._joined(message)
        elif isinstance(message, StepFrame):
            self._on_frame(source, message)
        elif isinstance(message, KvEvents):
            if not self.router.tree.apply_events(message):
                self._post(source, KvSnapshotRequest("gap"))
        elif isinstance(message, KvSnapshot):
            self.router.tree.apply_snapshot(message)
        elif isinstance(message, RoleChanged):
            self._changed_role(source, message)
        elif isinstance(message, Leaving):
            self.figures.leaving(source.replica_id)
            self.router.members.set_leaving(source.replica_id)
            self._let_streams(source, may_stay=False)

    def _joined(self, hello: ReplicaHello) -> None:
        identity, now = hello.identity, self._clock.now()
        self._hellos[identity] = hello
        self._targets[identity.replica_id] = HandOverTarget(identity, identity.replica_id)
        self.router.add_replica(identity, hello.role)
        self.router.loads.on_load(routed_load(hello.load, hello, now))
        self.figures.joined(hello, now)
        self._post(identity, KvSnapshotRequest("connect"))
        if self._pauses_batch:
            self._post(identity, PauseBatch(True))
        self.admission.pump()

    def _changed_role(self, source: ReplicaIdentity, changed: RoleChanged) -> None:
        self.router.add_replica(source, changed.role)
        self.figures.changed_role(source.replica_id, changed)
        self._let_streams(source, may_stay=changed.role != "prefill")

    def _let_streams(self, source: ReplicaIdentity, *, may_stay: bool) -> None:
        """Let streams leave a replica, or stay after all."""
        if not may_stay:
            self.admission.leave(source.replica_id)
        for call in list(self._calls.values()):
            call.apply(call.state.on_streams, source, may_stay)
        self.admission.pump()

    def _on_frame(self, source: ReplicaIdentity, frame: StepFrame) -> None:
        """Take the news of a step, as `cluster.gateway.request_manager.RequestManager.on_step` does."""
        now, calls = self._clock.now(), self._calls
        if frame.load is not None:
            self.router.loads.on_load(routed_load(frame.load, self._hellos[source], now))
            self.figures.loaded(frame.load, now)
        elif frame.queue is not None:
            self.router.loads.on_queue(source, routed_queue(frame.queue), now)
        for report in frame.prefills:
            if (call := calls.get(report.request_id)) is not None:
                self.figures.prefilled(report)
                call.apply(call.state.on_prefilled, report)
        for joined in frame.hand_overs:
            if (call := calls.get(joined.request_id)) is not None:
                call.apply(call.state.on_handed_over, source, joined)
        for delta in frame.deltas:
            if (call := calls.get(delta.request_id)) is not None:
                call.apply(call.state.on_delta, source, delta)
        for failure in frame.failures:
            self._on_failure(source, failure)
        for ended in frame.moves:
            if (call := calls.get(ended.request_id)) is not None:
                call.apply(call.state.on_move_ended, source, ended)
        if may_free_capacity(frame):
            self.admission.pump(source.replica_id)

    def _on_failure(self, source: ReplicaIdentity, failure: RequestFailed) -> None:
        if (call := self._calls.get(failure.request_id)) is not None:
            if failure.code == "refused":
                self.router.on_refused(failure.refused_by or source.replica_id)
            call.apply(call.state.on_failed, source, failure)

    def _on_rung(self, rung: Rung) -> None:
        self.rungs.append((self._clock.now(), rung))
        pauses_batch = rung >= Rung.BATCH_PAUSED
        if pauses_batch != self._pauses_batch:
            self._pauses_batch = pauses_batch
            for identity in self._hellos:
                self._post(identity, PauseBatch(pauses_batch))


def _refused(record: CallRecord, error: RequestError, now: float) -> None:
    record.ended_at, record.error = now, str(error)
    record.refusal = "refused" if isinstance(error, OverloadedError) else "failed"
