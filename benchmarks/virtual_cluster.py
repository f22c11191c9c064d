"""A gateway and replicas in virtual time: the real router and the real admission, before simulated engines.

    arrival --> RequestAdmission --> RouterService --> VirtualReplica (both)
                                                  \\--> VirtualReplica (prefill) --> VirtualReplica (decode)

Replicas report every 0.2 s, and the state of their queues after each step. Everything that crosses the
network takes 1 ms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from benchmarks.virtual_replica import (
    NETWORK_S,
    REPORT_S,
    EngineModel,
    StepNews,
    VirtualReplica,
    VirtualRequest,
)
from cluster.admission.admission import RequestAdmission
from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.ladder import Rung
from cluster.admission.queued_request import Outcome, QueuedRequest, Refused, Released
from cluster.errors import OverloadedError
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.kv_events import KvSnapshot
from kvtransfer.request_facts import RequestFacts, ServiceClass
from router.config import RouterConfig
from router.messages import Decision, QueueState, RouteRequest
from router.service import RouterService

BLOCK_TOKENS = 16


class Tenant(NamedTuple):
    """A sender of requests of one class: its part of all requests, and its weight."""

    name: str
    service_class: ServiceClass
    part: float = 1.0
    weight: float = 1.0


class Lengths(NamedTuple):
    """Tokens of prompts and outputs: log-normal, with these medians and spreads, within bounds."""

    prompt: float = 600.0
    output: float = 100.0
    spread: float = 0.8
    most_prompt: int = 6000
    most_output: int = 800

    def draw(self, source: random.Random) -> tuple[int, int]:
        """Return the tokens of a prompt and of its output."""
        num_prompt = int(self.prompt * source.lognormvariate(0.0, self.spread))
        num_output = int(self.output * source.lognormvariate(0.0, self.spread))
        return min(max(num_prompt, 16), self.most_prompt), min(max(num_output, 2), self.most_output)


class VirtualCluster:
    """One gateway and its replicas. `has_admission` False: whatever comes is routed at once."""

    def __init__(
        self,
        replicas: Iterable[tuple[str, EngineModel]],
        config: AdmissionConfig,
        seed: int,
        *,
        has_admission: bool = True,
        router_config: RouterConfig | None = None,
    ) -> None:
        """`replicas` are roles and what their steps take."""
        self.random = random.Random(seed)
        self.events = EventQueue()
        self.clock = self.events.clock
        self.config = config
        self.router = RouterService(
            router_config or RouterConfig(), BLOCK_TOKENS, self.clock, seed, salt="g0"
        )
        self.rungs: list[tuple[float, Rung]] = []
        self.admission = RequestAdmission(
            config,
            self.router,
            self.clock,
            lambda: self.random.getrandbits(32),
            self.events.at,
            self._on_rung,
        )
        self.requests: list[VirtualRequest] = []
        self._has_admission = has_admission
        # Calls of closed loops, one for each request that ends.
        self._on_end: Callable[[], object] = lambda: None
        self.replicas: dict[str, VirtualReplica] = {}
        for index, (role, model) in enumerate(replicas):
            replica = VirtualReplica(f"r{index:03}", model, self.events, self._on_step, self.replicas)
            self.replicas[replica.identity.replica_id] = replica
            self.router.add_replica(replica.identity, role)
            self.router.tree.apply_snapshot(KvSnapshot(replica.identity, 0, ()))
            self.router.loads.on_load(replica.load())
            self.events.after(self.random.random() * REPORT_S, lambda it=replica: self._report(it))  # type: ignore[misc]

    def offer(self, rate_s: float, until_s: float, tenants: list[Tenant], lengths: Lengths) -> None:
        """Let requests arrive at random (Poisson) from now until then, `rate_s` a second."""

        def arrive() -> None:
            if self.clock.now() < until_s:
                self.arrive(self._draw(tenants), lengths)
                self.events.after(self.random.expovariate(rate_s), arrive)

        self.events.after(self.random.expovariate(rate_s), arrive)

    def saturate(self, num_requests: int, tenants: list[Tenant], lengths: Lengths) -> None:
        """Keep `num_requests` requests in the cluster: one comes for each that ends."""

        def arrive() -> None:
            self.arrive(self._draw(tenants), lengths)

        self._on_end = arrive
        for _ in range(num_requests):
            arrive()

    def arrive(self, tenant: Tenant, lengths: Lengths) -> VirtualRequest:
        """Let a request arrive now, as `RequestManager` takes it."""
        now, flow = self.clock.now(), Flow(tenant.name, tenant.service_class)
        request = VirtualRequest(str(len(self.requests)), flow, *lengths.draw(self.random), now)
        self.requests.append(request)
        route_request = RouteRequest(
            request.request_id, RequestFacts(tenant.name), (), request.num_prompt, lengths.most_output
        )
        if not self._has_admission:
            self.submit(request, self.router.route(route_request))
            return request
        queued = QueuedRequest(request.request_id, flow, now, weight=tenant.weight)
        try:
            self.admission.checks.check_early(queued, 4 * request.num_prompt)
            capped = self.admission.degradation.max_tokens(tenant.service_class, lengths.most_output)
            request.num_output = min(request.num_output, capped)
            self.admission.place(queued, route_request)
        except OverloadedError as error:
            request.refusal, request.ended_at = str(error), now
            return request
        queued.report = partial(self._on_outcome, request)
        self.admission.wait(queued)
        return request

    def _on_outcome(self, request: VirtualRequest, outcome: Outcome) -> None:
        if isinstance(outcome, Released):
            self.submit(request, outcome.decision)
        else:
            assert isinstance(outcome, Refused), "no replica leaves"
            request.refusal, request.ended_at = str(outcome.error), self.clock.now()

    def _on_step(self, replica: VirtualReplica, state: QueueState, news: StepNews) -> None:
        self.events.after(NETWORK_S, lambda: self._on_frame(replica, state, news))

    def _on_frame(self, replica: VirtualReplica, state: QueueState, news: StepNews) -> None:
        """Take what a step of a replica brought."""
        now = self.clock.now()
        self.router.loads.on_queue(replica.identity, state, now)
        for request in news.first:
            request.first_token_at = now
            self.router.on_prefilled(request.request_id)
        for request in news.ended:
            request.ended_at = now
            self.router.on_finished(request.request_id)
            self._on_end()
        if self._has_admission:
            self.admission.pump(replica.identity.replica_id)

    def submit(self, request: VirtualRequest, decision: Decision) -> None:
        request.released_at = self.clock.now()
        compute = self.replicas[decision.compute_id]
        decode_id = decision.decode if decision.prefill else ""
        self.events.after(NETWORK_S, lambda: compute.submit(request, decode_id))

    def _report(self, replica: VirtualReplica) -> None:
        self.router.loads.on_load(replica.load())
        self.events.after(REPORT_S, lambda: self._report(replica))

    def _on_rung(self, rung: Rung) -> None:
        self.rungs.append((self.clock.now(), rung))
        for replica in self.replicas.values():
            replica.is_batch_paused = rung >= Rung.BATCH_PAUSED

    def _draw(self, tenants: list[Tenant]) -> Tenant:
        return self.random.choices(tenants, [it.part for it in tenants])[0]
