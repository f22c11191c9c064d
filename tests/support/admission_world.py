"""One gateway's admission with the real router, before replicas that compute one prompt after the other,
under a virtual clock."""

from __future__ import annotations

import itertools

from msgspec.structs import replace

from benchmarks.virtual_replica import StepNews, VirtualReplica, VirtualRequest, serial_model
from cluster.admission.admission import RequestAdmission
from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.ladder import Rung
from cluster.admission.queued_request import Outcome, QueuedRequest, Refused, Released
from cluster.errors import OverloadedError, RequestError
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.kv_events import KvSnapshot
from kvtransfer.request_facts import RequestFacts, ServiceClass
from router.config import RouterConfig
from router.messages import QueueState, RouteRequest
from router.service import RouterService

TOK_S = 1000.0
BATCH_TOKENS = 100
BLOCK_TOKENS = 16
STEPS_AHEAD = 2.5
CONFIG = AdmissionConfig.model_validate(
    {
        "interactive": {"ttft_s": 10.0, "weight": 8.0, "aging_s": 5.0, "max_wait_s": 10.0},
        "standard": {"ttft_s": 30.0, "weight": 4.0, "aging_s": 15.0, "max_wait_s": 30.0, "capped_tokens": 64},
        "batch": {"weight": 1.0, "aging_s": 60.0, "max_wait_s": 100.0},
        "max_queue_mb": 1.0,
    }
)


MODEL = serial_model(TOK_S, BLOCK_TOKENS)._replace(
    sequence_s=0.001, max_batch_tokens=BATCH_TOKENS, max_sequences=1000, transfer_s=1e-6
)


class Server(VirtualReplica):
    """A replica that computes one prompt after the other, beside sequences of others that decode there."""

    num_running = 0

    def queue_state(self) -> QueueState:
        return replace(super().queue_state(), num_running=self.num_running)


class NotedOutcomes:
    """Notes what becomes of a request that waits."""

    def __init__(self, world: AdmissionWorld, queued: QueuedRequest) -> None:
        self._world = world
        self._queued = queued
        self._is_announced = False

    def __call__(self, outcome: Outcome) -> None:
        world, name = self._world, self._queued.request_id
        assert name not in world.ended
        if isinstance(outcome, Released):
            world.released[name] = world.clock.now()
            num_tokens = self._queued.route_request.num_tokens
            request = VirtualRequest(name, self._queued.flow, num_tokens, 1, self._queued.arrived_at)
            world.servers[outcome.decision.compute_id].submit(request)
        elif isinstance(outcome, Refused):
            assert isinstance(outcome.error, OverloadedError)
            world.refused[name] = world.clock.now()
            world.errors.append(outcome.error)
        else:
            world.unplaced[name] = world.clock.now()
        self._queued.close()

    def announce(self, queued: QueuedRequest) -> None:
        if self._is_announced:
            pair = queued.decision.prefill, queued.decision.decode
            self._world.moved.append((queued.request_id, *pair))
        self._is_announced = True


class AdmissionWorld:
    """One gateway and some replicas, named by their roles: p0 and p1 (prefill), d0 (decode), r0 (both)."""

    def __init__(
        self, num_replicas: int = 1, config: AdmissionConfig = CONFIG, names: tuple[str, ...] = ()
    ) -> None:
        self.events = EventQueue()
        self.clock = self.events.clock
        draws = itertools.count(step=997)
        self.router = RouterService(
            RouterConfig(steps_ahead=STEPS_AHEAD), BLOCK_TOKENS, self.clock, 1, salt="g"
        )
        self.rungs: list[Rung] = []
        self.admission = RequestAdmission(
            config,
            self.router,
            self.clock,
            lambda: next(draws),
            self.events.at,
            self.rungs.append,
        )
        names = names or tuple(f"r{index}" for index in range(num_replicas))
        self.servers: dict[str, Server] = {}
        for name in names:
            self.servers[name] = Server(name, MODEL, self.events, self._on_step, self.servers)
        self.requests: dict[str, QueuedRequest] = {}
        self.released: dict[str, float] = {}
        self.refused: dict[str, float] = {}
        self.unplaced: dict[str, float] = {}
        # Announced again: the name of the request, its prefill replica and its decode replica.
        self.moved: list[tuple[str, str, str]] = []
        self.errors: list[OverloadedError] = []
        self.ended_early: dict[str, OverloadedError] = {}
        self.unattainable: dict[str, RequestError] = {}
        self.first_token_at: dict[str, float] = {}
        for server in self.servers.values():
            role = {"p": "prefill", "d": "decode", "r": "both"}[server.identity.replica_id[0]]
            self.router.add_replica(server.identity, role)
            self.router.tree.apply_snapshot(KvSnapshot(server.identity, 0, ()))
            self.router.loads.on_load(server.load())

    @property
    def ended(self) -> set[str]:
        """The requests of which an outcome was reported."""
        return {*self.released, *self.refused, *self.unplaced}

    def run(self, until_s: float = float("inf")) -> None:
        while self.has_due(until_s):
            self.step()
        if until_s < float("inf"):
            self.clock.advance(until_s - self.clock.now())

    def has_due(self, until_s: float) -> bool:
        """Whether something happens until then."""
        return self.events.next_at <= until_s and self.events.next_at < float("inf")

    def step(self) -> None:
        """Let happen what is next, as one turn of an event loop."""
        self.events.step()
        self.admission.check()
        self.router.check()

    def _on_step(self, replica: VirtualReplica, state: QueueState, news: StepNews) -> None:
        for request in news.ended:
            self.first_token_at[request.request_id] = self.clock.now()
            self.router.loads.on_queue(replica.identity, state, self.clock.now())
            self.router.on_prefilled(request.request_id)
            self.router.on_finished(request.request_id)
            self.admission.pump()

    def arrive(
        self,
        request_id: str,
        num_tokens: int = 1000,
        tenant: str = "a",
        service_class: ServiceClass = "interactive",
        *,
        weight: float = 1.0,
        deadline_s: float | None = None,
        num_bytes: int = 100,
        priority: int = 0,
        keys: tuple[bytes, ...] = (),
    ) -> QueuedRequest | None:
        """Add a request that arrives and return it; None where it is refused."""
        queued = self.new(
            request_id, tenant, service_class, weight=weight, deadline_s=deadline_s, priority=priority
        )
        try:
            self.admission.checks.check_early(queued, num_bytes)
            self.admission.place(queued, RouteRequest(request_id, RequestFacts(tenant), keys, num_tokens, 16))
        except OverloadedError as error:
            self.ended_early[request_id] = error
            return None
        except RequestError as error:
            self.unattainable[request_id] = error
            return None
        self.admission.bytes.count(queued, num_bytes)
        self.requests[request_id] = queued
        queued.report = queued.announcer = NotedOutcomes(self, queued)
        self.admission.wait(queued)
        return queued

    def new(
        self,
        request_id: str,
        tenant: str = "a",
        service_class: ServiceClass = "interactive",
        *,
        weight: float = 1.0,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> QueuedRequest:
        """Return a request that has come and that admission does not know yet."""
        now = self.clock.now()
        deadline_at = None if deadline_s is None else now + deadline_s
        queued = QueuedRequest(
            request_id, Flow(tenant, service_class), now, weight, priority, deadline_at=deadline_at
        )
        queued.on_close(self.admission.drop, queued)
        return queued

    def ttft_s(self, request_id: str) -> float:
        return self.first_token_at[request_id] - self.requests[request_id].arrived_at
