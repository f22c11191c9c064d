"""The parts of a gateway's admission by themselves, over a router whose replicas report what a test wants."""

from __future__ import annotations

from router_harness import RouterHarness

from cluster.admission.admission_checks import AdmissionChecks
from cluster.admission.config import AdmissionConfig
from cluster.admission.degradation import Degradation
from cluster.admission.flow import Flow
from cluster.admission.overload_refusals import OverloadRefusals
from cluster.admission.queue_placement import QueuePlacement
from cluster.admission.queued_bytes import QueuedBytes
from cluster.admission.queued_request import QueuedRequest
from cluster.admission.waiting_requests import WaitingRequests
from kvtransfer.request_facts import RequestFacts, ServiceClass
from router.messages import RouteRequest

# As the replicas of `RouterHarness` report it.
PREFILL_TOK_S = 10_000.0


class AdmissionParts:
    """What `RequestAdmission` connects, without it: nothing is released, and time stands still."""

    def __init__(self, *replicas: str, config: AdmissionConfig | None = None) -> None:
        """`replicas` are named by role, as in `RouterHarness`."""
        self.config = config or AdmissionConfig()
        self.harness = RouterHarness(*replicas)
        self.router, self.clock = self.harness.router, self.harness.clock
        self.bytes = QueuedBytes(self.config.max_queue_mb * 1e6)
        self.refusals = OverloadRefusals(lambda: 0)  # no jitter
        self.degradation = Degradation(self.config, self.clock, lambda rung: None)
        self.waiting = WaitingRequests(self.config, self.router)
        self.placement = QueuePlacement(self.config, self.router, self.waiting, self.degradation)
        self.checks = AdmissionChecks(
            self.config,
            self.router,
            self.waiting,
            self.placement,
            queued_bytes=self.bytes,
            degradation=self.degradation,
            refusals=self.refusals,
        )

    @property
    def now(self) -> float:
        """The time of the clock, in seconds."""
        return self.clock.now()

    def new(
        self,
        request_id: str = "q",
        tenant: str = "a",
        service_class: ServiceClass = "interactive",
        *,
        weight: float = 1.0,
        left_s: float | None = None,
    ) -> QueuedRequest:
        """Return a request that arrives now; `left_s` is the rest of its deadline, in seconds."""
        deadline_at = None if left_s is None else self.now + left_s
        return QueuedRequest(
            request_id, Flow(tenant, service_class), self.now, weight, deadline_at=deadline_at
        )

    def place(
        self,
        request_id: str = "q",
        num_tokens: int = 1000,
        *,
        keys: tuple[bytes, ...] = (),
        excluded: tuple[str, ...] = (),
    ) -> QueuedRequest:
        """Let a new request of this many prompt tokens wait where it costs least."""
        queued = self.new(request_id)
        queued.route_request = self.route_request(request_id, num_tokens, keys=keys, excluded=excluded)
        decision = self.placement.decide(queued, queued.route_request, self.now)
        self.placement.place(queued, decision, self.now)
        return queued

    def route_request(
        self,
        request_id: str = "q",
        num_tokens: int = 1000,
        *,
        keys: tuple[bytes, ...] = (),
        excluded: tuple[str, ...] = (),
    ) -> RouteRequest:
        """Return the router's request for this many prompt tokens."""
        return RouteRequest(request_id, RequestFacts("a"), keys, num_tokens, 16, excluded=excluded)

    def queued_at(self, replica_id: str) -> list[str]:
        """Return the ids of the requests that wait for a replica, in no order."""
        return [it.request_id for it in self.waiting if it.decision.compute_id == replica_id]

    def check(self) -> None:
        """Assert that the waiting requests, their queues and the router's placements agree."""
        self.waiting.check()
        self.router.check()
        assert {it.request_id for it in self.router.own_placements()} == {
            it.request_id for it in self.waiting
        }
