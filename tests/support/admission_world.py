"""One gateway's admission with the real router, before replicas that compute one prompt after the other,
under a virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from cluster.admission.admission import RequestAdmission
from cluster.admission.config import AdmissionConfig
from cluster.admission.fair_queue import Flow
from cluster.admission.held import Candidacy, HeldRequest
from cluster.admission.ladder import Rung
from cluster.admission.queued_bytes import ByteHold
from cluster.errors import OverloadedError, RequestError
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import KvSnapshot, ReplicaIdentity
from router.config import RouterConfig
from router.messages import QueueState, ReplicaLoad, RouteRequest
from router.service import RouterService
from workers.messages.link import ServiceClass

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
        world.router.on_queue(self.identity, state, world.clock.now())
        world.router.on_prefilled(request_id)
        world.router.on_finished(request_id)
        world.admission.pump()


class NotedEffects:
    """Notes what becomes of a request that is held."""

    def __init__(self, world: AdmissionWorld, request_id: str) -> None:
        self._world = world
        self._request_id = request_id

    def on_released(self, held: HeldRequest) -> None:
        self._end(self._world.released)
        compute_id = held.decision.compute_id
        self._world.servers[compute_id].take(self._request_id, held.request.num_tokens)

    def on_refused(self, error: OverloadedError) -> None:
        self._end(self._world.refused)
        self._world.errors.append(error)

    def on_moved(self, held: HeldRequest) -> None:
        self._world.moved.append((self._request_id, held.decision.prefill, held.decision.decode))
        self._world.at(held.refused_at, self._world.admission.pump)

    def on_unplaced(self, reason: str, retry_after_s: float) -> None:
        self._end(self._world.unplaced)

    def _end(self, ended: dict[str, float]) -> None:
        world = self._world
        assert self._request_id not in {*world.released, *world.refused, *world.unplaced}
        ended[self._request_id] = world.clock.now()
        world.queued.pop(self._request_id).release()


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
            lambda call: self.at(self.clock.now(), call),
            self.rungs.append,
        )
        names = names or tuple(f"r{index}" for index in range(num_replicas))
        self.servers = {name: Server(self, name) for name in names}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.candidacies: dict[str, Candidacy] = {}
        self.released: dict[str, float] = {}
        self.refused: dict[str, float] = {}
        self.unplaced: dict[str, float] = {}
        self.queued: dict[str, ByteHold] = {}
        self.moved: list[tuple[str, str, str]] = []
        self.errors: list[OverloadedError] = []
        self.ended_early: dict[str, OverloadedError] = {}
        self.unattainable: dict[str, RequestError] = {}
        self.first_token_at: dict[str, float] = {}
        for server in self.servers.values():
            role = {"p": "prefill", "d": "decode", "r": "both"}[server.identity.replica_id[0]]
            self.router.add_replica(server.identity, role)
            self.router.on_snapshot(KvSnapshot(server.identity, 0, ()))
            self.router.on_load(server.load())

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
        """Let happen what is next, as one turn of an event loop."""
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
    ) -> HeldRequest | None:
        """A request comes; None where it is refused."""
        now = self.clock.now()
        flow = Flow(tenant, service_class)
        deadline_at = None if deadline_s is None else now + deadline_s
        route_request = RouteRequest(request_id, tenant, keys, num_tokens, 16)
        candidacy = Candidacy(flow, weight, priority, now, deadline_at)
        try:
            self.admission.check_early(flow, weight, now, deadline_at, num_bytes)
            held = self.admission.admit(route_request, candidacy)
        except OverloadedError as error:
            self.ended_early[request_id] = error
            return None
        except RequestError as error:
            self.unattainable[request_id] = error
            return None
        self.queued[request_id] = self.admission.queued.hold(num_bytes)
        self.candidacies[request_id] = candidacy
        self.at(held.refused_at, self.admission.pump)
        self.admission.hold(held, NotedEffects(self, request_id))
        return held

    def drop(self, held: HeldRequest) -> None:
        """A request that waits ends."""
        self.admission.drop(held)
        if (queued := self.queued.pop(held.request.request_id, None)) is not None:
            queued.release()

    def ttft_s(self, request_id: str) -> float:
        return self.first_token_at[request_id] - self.candidacies[request_id].arrived_at
