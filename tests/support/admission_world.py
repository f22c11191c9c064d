"""One gateway's admission with the real router, before replicas that compute one prompt after the other,
under a virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from cluster.admission.admission import RequestAdmission
from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.ladder import Rung
from cluster.admission.queued_request import Outcome, QueuedRequest, Refused, Released
from cluster.errors import OverloadedError, RequestError
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import KvSnapshot, ReplicaIdentity
from kvtransfer.request_facts import RequestFacts, ServiceClass
from router.config import RouterConfig
from router.messages import QueueState, ReplicaLoad, RouteRequest
from router.service import RouterService

TOK_S = 1000.0
BATCH_TOKENS = 100
STEPS_AHEAD = 2.5
CONFIG = AdmissionConfig.model_validate(
    {
        "interactive": {"ttft_s": 10.0, "weight": 8.0, "aging_s": 5.0, "max_wait_s": 10.0},
        "standard": {"ttft_s": 30.0, "weight": 4.0, "aging_s": 15.0, "max_wait_s": 30.0, "capped_tokens": 64},
        "batch": {"weight": 1.0, "aging_s": 60.0, "max_wait_s": 100.0},
        "max_queue_mb": 1.0,
    }
)


class Server:
    """A replica that computes one prompt after the other, `TOK_S` tokens a second over `slowness`."""

    def __init__(self, world: AdmissionWorld, name: str) -> None:
        self.identity = ReplicaIdentity(name, 1)
        self.slowness = 1.0
        # Sequences of others that decode there.
        self.num_running = 0
        self.num_taken = 0
        self._world = world
        self._queue: list[tuple[str, int]] = []
        self._busy_until = 0.0

    @property
    def num_backlog_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self._queue)

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            identity=self.identity,
            received_at=self._world.clock.now(),
            num_running=self.num_running,
            num_waiting=len(self._queue),
            num_landings=0,
            num_backlog_tokens=self.num_backlog_tokens,
            num_free_blocks=1_000_000,
            num_total_blocks=1_000_000,
            prefill_tok_s=TOK_S,
            decode_step_s=0.001,
            transfer_tok_s=1e6,
            prefill_token_s=1 / TOK_S,
            max_batch_tokens=BATCH_TOKENS,
            max_sequences=1000,
        )

    def take(self, request_id: str, num_tokens: int) -> None:
        self.num_taken += 1
        self._queue.append((request_id, num_tokens))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        took_s = self._queue[0][1] / TOK_S * self.slowness
        self._world.at(self._world.clock.now() + took_s, self._done)

    def _done(self) -> None:
        request_id, _ = self._queue.pop(0)
        if self._queue:
            self._begin()
        world = self._world
        world.first_token_at[request_id] = world.clock.now()
        state = QueueState(self.num_running, len(self._queue), 0, self.num_backlog_tokens, 1_000_000)
        world.router.loads.on_queue(self.identity, state, world.clock.now())
        world.router.on_prefilled(request_id)
        world.router.on_finished(request_id)
        world.admission.pump()


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
            world.servers[outcome.decision.compute_id].take(name, num_tokens)
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
        self.clock = ManualClock()
        draws = itertools.count(step=997)
        self.router = RouterService(RouterConfig(steps_ahead=STEPS_AHEAD), 16, self.clock, 1, salt="g")
        self.rungs: list[Rung] = []
        self.admission = RequestAdmission(
            config,
            self.router,
            self.clock,
            lambda: next(draws),
            self.at,
            self.rungs.append,
        )
        names = names or tuple(f"r{index}" for index in range(num_replicas))
        self.servers = {name: Server(self, name) for name in names}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
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

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), call))

    def run(self, until_s: float = float("inf")) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.step()
        if until_s < float("inf"):
            self.clock.advance(until_s - self.clock.now())

    def has_due(self, until_s: float) -> bool:
        """Whether something happens until then."""
        return bool(self._due) and self._due[0][0] <= until_s

    def step(self) -> None:
        """Run the next event, as one turn of an event loop."""
        time_s, _, call = heapq.heappop(self._due)
        self.clock.advance(max(0.0, time_s - self.clock.now()))
        call()
        self.admission.check()
        self.router.check()

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
            self.admission.check_early(queued, num_bytes)
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
