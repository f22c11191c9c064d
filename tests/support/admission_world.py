"""One gateway's admission with the real router, before simulated replicas that compute one prompt after the
other, under a virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from msgspec.structs import asdict, replace

from cluster.admission.admission import RequestAdmission
from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.ladder import Rung
from cluster.admission.queued_request import Outcome, QueuedRequest, Refused, Released
from cluster.errors import OverloadedError, RequestError
from cluster.gateway.reported_load import routed_queue
from cluster.simulation.simulated_replica import SimulatedEngine, SimulatedReplica
from cluster.simulation.step_model import StepModel
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.kv_events import KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts, ServiceClass
from router.config import RouterConfig
from router.messages import QueueState, ReplicaLoad, RouteRequest
from router.service import RouterService
from workers.messages.link import LinkUp, SampleState, StepFrame, Submission
from workers.messages.sampling import SamplingParams

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


# One sequence at a time, whose prompt is one step: the tokens of a step and the places that are reported are
# other ones, and so is the memory, which has space for everything.
ENGINE = SimulatedEngine(
    StepModel(base_s=0.0, sequence_s=0.0, context_s=0.0, token_s=1 / TOK_S),
    num_blocks=300,
    block_tokens=1024,
    max_batch_tokens=1 << 19,
    chunk_tokens=1 << 19,
    max_sequences=1,
)
MAX_SEQUENCES, NUM_BLOCKS = 1000, 1_000_000
_GATEWAY = "g", 1
# A replica looks after leases once, and never again.
_SOON_S = 1e-9
_ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


class _NewsOf:
    """The link to the gateway (`workers.replica.gateway_links.NewsStream`), which takes no time."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def send(self, frame: LinkUp) -> None:
        if isinstance(frame, StepFrame):
            self._server.sent(frame)

    def close(self) -> None:
        """Nobody waits for the end."""


class _DisturbedSteps(StepModel):
    """Steps that take `slowness` times as long as the replica knows."""

    slowness = 1.0

    def step_s(self, num_sequences: int, num_context_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        return self.slowness * super().step_s(num_sequences, num_context_tokens, chunks)


class Server(SimulatedReplica):
    """A replica that computes one prompt after the other, beside sequences of others that decode there."""

    def __init__(
        self, name: str, role: str, events: EventQueue, on_end: Callable[[Server, str], None]
    ) -> None:
        """`on_end` is called when a request has its token."""
        self._disturbed = _DisturbedSteps(*ENGINE.steps)
        self._has_turn = False
        engine = ENGINE._replace(steps=self._disturbed)
        super().__init__(ReplicaIdentity(name, 1), role, engine, events, lambda _: None, {}, False, _SOON_S)
        self.num_running = 0
        self.num_submitted = 0
        self._on_end = on_end
        self._gateways.connected(_GATEWAY, _NewsOf(self))

    @property
    def slowness(self) -> float:
        """How many times as long steps take as they should."""
        return self._disturbed.slowness

    @slowness.setter
    def slowness(self, slowness: float) -> None:
        self._disturbed.slowness = slowness

    def submit(self, request_id: str, num_tokens: int) -> None:
        """Take a request of so many tokens, whose answer has one."""
        self.num_submitted += 1
        prompt = bytes(4 * num_tokens)
        sample = SampleState(0, self.num_submitted)
        self.receive(
            _GATEWAY,
            Submission(
                request_id, 1, "", "", 0, prompt, b"root", (), (sample,), _ONE_TOKEN, None, None, True
            ),
        )

    def sent(self, frame: StepFrame) -> None:
        """Take the news of a step."""
        for failure in frame.failures:
            raise AssertionError(failure)
        for delta in frame.deltas:
            self._on_end(self, delta.request_id)

    def queue_state(self) -> QueueState:
        """Return what the gateway is told of the queue."""
        queue = routed_queue(self.reports.queue())
        num_waiting = queue.num_running + queue.num_waiting
        return replace(
            queue, num_running=self.num_running, num_waiting=num_waiting, num_free_blocks=NUM_BLOCKS
        )

    def load(self) -> ReplicaLoad:
        """Return what the gateway is told of the replica."""
        return ReplicaLoad(
            identity=self.identity,
            received_at=self._clock.now(),
            **asdict(self.queue_state()),
            num_total_blocks=NUM_BLOCKS,
            prefill_tok_s=TOK_S,
            decode_step_s=0.001,
            transfer_tok_s=1e6,
            prefill_token_s=1 / TOK_S,
            max_batch_tokens=BATCH_TOKENS,
            max_sequences=MAX_SEQUENCES,
        )

    def wake(self) -> None:
        """Take a turn at once, and not as an event of its own, unless this is one."""
        if self._has_turn:
            super().wake()
            return
        self._has_turn = True
        self.pump()
        self._has_turn = False

    def _tick(self) -> None:
        """Look after no leases: the events of a world come to an end."""


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
            world.servers[outcome.decision.compute_id].submit(name, num_tokens)
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
            role = {"p": "prefill", "d": "decode", "r": "both"}[name[0]]
            self.servers[name] = Server(name, role, self.events, self._on_end)
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
            self.router.add_replica(server.identity, server.role)
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

    def _on_end(self, server: Server, request_id: str) -> None:
        self.first_token_at[request_id] = self.clock.now()
        self.router.loads.on_queue(server.identity, server.queue_state(), self.clock.now())
        self.router.on_prefilled(request_id)
        self.router.on_finished(request_id)
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
        kv_share: float = 1.0,
    ) -> QueuedRequest | None:
        """Add a request that arrives and return it; None where it is refused."""
        facts = RequestFacts(tenant, sharing_group=tenant, kv_share=kv_share)
        queued = self.new(
            request_id, tenant, service_class, weight=weight, deadline_s=deadline_s, priority=priority
        )
        try:
            self.admission.checks.check_early(queued, num_bytes)
            self.admission.place(queued, RouteRequest(request_id, facts, keys, num_tokens, 16))
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
