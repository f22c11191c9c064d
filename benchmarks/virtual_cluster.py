"""A gateway and replicas in virtual time: the real router and the real admission, before simulated engines.

    arrival --> RequestAdmission --> RouterService --> VirtualReplica (both)
                                                  \\--> VirtualReplica (prefill) --> VirtualReplica (decode)

An engine plans a step at a time, as replicas do: every sequence that decodes gets one token, and what is
left of the step's tokens computes prompts, the oldest first. A step takes base + sequences x `sequence_s` +
context tokens x `context_s` + prompt tokens x `token_s`. A sequence needs a place and KV blocks; the youngest
loses them when they run out, and is computed again. Replicas report every 0.2 s, and the state of their
queues after each step. Everything that crosses the network takes 1 ms.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from cluster.admission.admission import RequestAdmission
from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.ladder import Rung
from cluster.admission.queued_request import Outcome, QueuedRequest, Refused, Released
from cluster.errors import OverloadedError
from kvtransfer.common.clock import ManualClock
from kvtransfer.common.health import moving_average
from kvtransfer.messages import KvSnapshot, ReplicaIdentity
from kvtransfer.request_facts import RequestFacts, ServiceClass
from router.config import RouterConfig
from router.messages import Decision, QueueState, ReplicaLoad, RouteRequest
from router.service import RouterService
from workers.scheduler.step_costs import FIRST_DECODE_RATIO, NonNegativeFit

BLOCK_TOKENS = 16
REPORT_S = 0.2
NETWORK_S = 0.001


class EngineModel(NamedTuple):
    """The step times and resources of a replica. The default serves about one request a second."""

    base_s: float = 0.03
    sequence_s: float = 0.001
    context_s: float = 1e-6
    token_s: float = 0.00025
    max_batch_tokens: int = 256
    max_sequences: int = 32
    num_blocks: int = 8000
    # The time to send the KV of a token to another replica.
    transfer_s: float = 2e-5

    def work_s(self, num_prompt: int, num_output: int) -> float:
        """Return the seconds that a request takes of a replica on which all sequences run."""
        each_s = self.base_s / self.max_sequences + self.sequence_s + num_prompt * self.context_s
        return num_prompt * self.token_s + num_output * each_s


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


@dataclass(slots=True, eq=False)
class VirtualRequest:
    """One request and what became of it."""

    request_id: str
    tenant: Tenant
    num_prompt: int
    num_output: int
    arrived_at: float
    released_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    # Why it was refused: "late", "aged" and so on.
    refusal: str = ""

    @property
    def ttft_s(self) -> float:
        return float("inf") if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float:
        """Mean time of an output token after the first."""
        if self.ended_at is None or self.first_token_at is None:
            return float("inf")
        return (self.ended_at - self.first_token_at) / max(1, self.num_output - 1)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request at a replica. `num_known` tokens must be in the KV before it decodes."""

    request: VirtualRequest
    num_known: int
    decode_id: str = ""
    num_computed: int = 0
    num_sampled: int = 0
    num_blocks: int = 0

    @property
    def context(self) -> int:
        return self.num_computed

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed >= self.num_known


@dataclass(slots=True)
class _News:
    """The results of a step, for the gateway."""

    first: list[VirtualRequest] = field(default_factory=list)
    ended: list[VirtualRequest] = field(default_factory=list)


class VirtualReplica:
    """A replica without an engine: only how long its steps take."""

    def __init__(self, cluster: VirtualCluster, name: str, role: str, model: EngineModel) -> None:
        self.identity = ReplicaIdentity(name, 1)
        self.role = role
        self.model = model
        self._cluster = cluster
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        # Paused sequences of class batch keep their blocks while no other sequence needs them.
        self._paused: list[_Sequence] = []
        # Accepted, and waiting for blocks at the replica that will decode.
        self._unlanded: set[_Sequence] = set()
        self._landing_queue: deque[tuple[_Sequence, Callable[[], None]]] = deque()
        self._landings: dict[_Sequence, int] = {}
        self._num_free_blocks = model.num_blocks
        self._backlog_tokens = 0
        self._is_busy = False
        self._prefill_tok_s = 0.0
        self._decode_step_s = 0.0
        # Coefficients of steps, fitted as `workers.scheduler.step_costs.StepCosts` does.
        self._decode_fit = NonNegativeFit(FIRST_DECODE_RATIO)
        self._prefill_fit = NonNegativeFit((1.0,))
        self.num_preemptions = 0

    def load(self) -> ReplicaLoad:
        """Return the report of this moment."""
        model = self.model
        queue = self.queue_state()
        base_s, sequence_s, context_s = self._decode_fit.coefficients or (0.0, 0.0, 0.0)
        (token_s,) = self._prefill_fit.coefficients or (0.0,)
        return ReplicaLoad(
            identity=self.identity,
            received_at=self._cluster.clock.now(),
            num_running=queue.num_running,
            num_waiting=queue.num_waiting,
            num_landings=queue.num_landings,
            num_backlog_tokens=queue.num_backlog_tokens,
            num_free_blocks=queue.num_free_blocks,
            num_total_blocks=model.num_blocks,
            prefill_tok_s=self._prefill_tok_s,
            decode_step_s=self._decode_step_s,
            transfer_tok_s=1 / model.transfer_s,
            prefill_token_s=token_s,
            decode_base_s=base_s,
            decode_sequence_s=sequence_s,
            decode_context_s=context_s,
            num_context_tokens=queue.num_context_tokens,
            max_batch_tokens=model.max_batch_tokens,
            max_sequences=model.max_sequences,
        )

    def queue_state(self) -> QueueState:
        """Return the state that changes with every step."""
        return QueueState(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._unlanded),
            num_landings=len(self._landings) + len(self._landing_queue),
            num_backlog_tokens=self._backlog_tokens
            - sum(max(0, it.num_known - it.num_computed) for it in self._paused),
            num_free_blocks=self._num_free_blocks,
            num_context_tokens=sum(it.num_computed for it in self._running),
        )

    def submit(self, request: VirtualRequest, decode_id: str) -> None:
        """Take a request; with a `decode_id` it is handed over there after its first token."""
        sequence = _Sequence(request, request.num_prompt, decode_id)
        self._backlog_tokens += request.num_prompt
        if not decode_id:
            self._waiting.append(sequence)
            self._step()
            return
        self._unlanded.add(sequence)

        def landed() -> None:
            self._unlanded.discard(sequence)
            self._waiting.append(sequence)
            self._step()

        decode = self._cluster.replicas[decode_id]
        self._cluster.after(NETWORK_S, lambda: decode.expect(sequence, landed))

    def expect(self, sequence: _Sequence, landed: Callable[[], None]) -> None:
        """Reserve blocks for a prompt that another replica computes, and then call `landed` there."""
        self._landing_queue.append((sequence, landed))
        self._grant()

    def join(self, sequence: _Sequence) -> None:
        """Decode a sequence whose KV has arrived in its landing."""
        sequence.num_blocks = self._landings.pop(sequence)
        self._waiting.appendleft(sequence)
        self._step()

    def forget(self, sequence: _Sequence) -> None:
        """Free the landing of a request that ended with its first token."""
        self._num_free_blocks += self._landings.pop(sequence)
        self._grant()

    def _grant(self) -> None:
        while self._landing_queue:
            sequence, landed = self._landing_queue[0]
            num_blocks = _blocks(sequence.num_known + 1)
            if not self._take_blocks(num_blocks) and (self._running or self._landings):
                return
            self._landing_queue.popleft()
            self._num_free_blocks -= num_blocks
            self._landings[sequence] = num_blocks
            self._cluster.after(NETWORK_S, landed)

    def _step(self) -> None:
        """Begin a step, unless one runs or nothing is to do."""
        if self._is_busy:
            return
        self._pause()
        self._start_sequences()
        planned = list(self._running)
        decodes = [it for it in planned if it.is_prefilled]
        self._grow(decodes)
        decodes = [it for it in decodes if it.num_blocks]
        budget = self.model.max_batch_tokens - len(decodes)
        chunks: list[tuple[_Sequence, int]] = []
        for sequence in planned:
            if budget > 0 and sequence.num_blocks and not sequence.is_prefilled:
                num_tokens = min(budget, sequence.num_known - sequence.num_computed)
                chunks.append((sequence, num_tokens))
                budget -= num_tokens
        if not decodes and not chunks:
            return
        self._is_busy = True
        model = self.model
        num_chunk_tokens = sum(num_tokens for _, num_tokens in chunks)
        num_context_tokens = sum(it.num_computed for it in decodes)
        decode_s = len(decodes) * model.sequence_s + num_context_tokens * model.context_s
        step_s = model.base_s + decode_s + num_chunk_tokens * model.token_s
        if chunks:
            tok_s = (num_chunk_tokens + len(decodes)) / step_s
            self._prefill_tok_s = moving_average(self._prefill_tok_s, tok_s, 0.2)
            if not decodes or self._decode_fit.coefficients:
                known_s = self._decode_fit.predict((0.0, len(decodes), num_context_tokens))
                self._prefill_fit.add((num_chunk_tokens,), step_s - known_s, 1.0 / num_chunk_tokens)
        else:
            self._decode_step_s = moving_average(self._decode_step_s, step_s, 0.1)
            self._decode_fit.add((1.0, len(decodes), num_context_tokens), step_s)
        self._cluster.after(step_s, lambda: self._done(decodes, chunks))

    def _pause(self) -> None:
        """Take batch sequences out while they are paused and others are there, or back in."""
        batch = [it for it in self._running if it.request.tenant.service_class == "batch"]
        num_others = len(self._running) - len(batch)
        num_others += sum(it.request.tenant.service_class != "batch" for it in self._waiting)
        if self._cluster.is_batch_paused and num_others:
            self._running = [it for it in self._running if it not in batch]
            self._paused += batch
        elif self._paused:
            self._waiting.extendleft(self._paused)
            self._paused.clear()

    def _take_blocks(self, num_blocks: int) -> bool:
        """Whether `num_blocks` blocks are free, at the cost of paused sequences."""
        while num_blocks > self._num_free_blocks and (kept := [it for it in self._paused if it.num_blocks]):
            self._evict(kept[-1])
        return num_blocks <= self._num_free_blocks

    def _evict(self, victim: _Sequence) -> None:
        """Free the sequence's blocks: it is computed again."""
        self._num_free_blocks += victim.num_blocks
        self._backlog_tokens += min(victim.num_computed, victim.num_known)
        victim.num_known = max(victim.num_known, victim.num_computed)
        victim.num_computed = victim.num_blocks = 0
        self.num_preemptions += 1

    def _start_sequences(self) -> None:
        """Move waiting sequences to the running ones, as far as slots and blocks allow."""
        while self._waiting and len(self._running) < self.model.max_sequences:
            sequence = self._waiting[0]
            if not sequence.num_blocks:
                num_blocks = _blocks(sequence.num_known + 1)
                if not self._take_blocks(num_blocks) and self._running:
                    return
                self._num_free_blocks -= num_blocks
                sequence.num_blocks = num_blocks
            self._running.append(self._waiting.popleft())

    def _grow(self, decodes: Iterable[_Sequence]) -> None:
        """Give each the block for its next token; the youngest sequences lose theirs when there is none."""
        for sequence in decodes:
            if not sequence.num_blocks or _blocks(sequence.num_computed + 1) <= sequence.num_blocks:
                continue
            while not self._take_blocks(1) and self._running[-1] is not sequence:
                victim = self._running.pop()
                self._evict(victim)
                self._waiting.appendleft(victim)
            self._num_free_blocks -= 1
            sequence.num_blocks += 1

    def _done(self, decodes: list[_Sequence], chunks: list[tuple[_Sequence, int]]) -> None:
        self._is_busy = False
        news = _News()
        for sequence in decodes:
            sequence.num_computed += 1
            self._sample(sequence, news)
        for sequence, num_tokens in chunks:
            sequence.num_computed += num_tokens
            self._backlog_tokens -= num_tokens
            if sequence.is_prefilled:
                self._sample(sequence, news)
        self._grant()
        self._step()
        state = self.queue_state()
        self._cluster.after(NETWORK_S, lambda: self._cluster.on_frame(self, state, news))

    def _sample(self, sequence: _Sequence, news: _News) -> None:
        request = sequence.request
        sequence.num_sampled += 1
        if sequence.num_sampled == 1:
            news.first.append(request)
        if sequence.num_sampled >= request.num_output:
            news.ended.append(request)
            self._release(sequence)
            if sequence.decode_id:
                self._cluster.replicas[sequence.decode_id].forget(sequence)
        elif sequence.decode_id:
            self._hand_over(sequence)

    def _hand_over(self, sequence: _Sequence) -> None:
        decode = self._cluster.replicas[sequence.decode_id]
        sequence.decode_id = ""
        self._release(sequence)
        delay_s = NETWORK_S + sequence.num_known * self.model.transfer_s
        self._cluster.after(delay_s, lambda: decode.join(sequence))

    def _release(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._num_free_blocks += sequence.num_blocks
        sequence.num_blocks = 0


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
        self.clock = ManualClock()
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
            self.at,
            self._on_rung,
        )
        self.is_batch_paused = False
        self.requests: list[VirtualRequest] = []
        self._has_admission = has_admission
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        # Calls of closed loops, one for each request that ends.
        self._on_end: Callable[[], object] = lambda: None
        self.replicas: dict[str, VirtualReplica] = {}
        for index, (role, model) in enumerate(replicas):
            replica = VirtualReplica(self, f"r{index:03}", role, model)
            self.replicas[replica.identity.replica_id] = replica
            self.router.add_replica(replica.identity, role)
            self.router.tree.apply_snapshot(KvSnapshot(replica.identity, 0, ()))
            self.router.loads.on_load(replica.load())
            self.after(self.random.random() * REPORT_S, lambda it=replica: self._report(it))  # type: ignore[misc]

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call it then."""
        heapq.heappush(self._due, (time_s, next(self._numbers), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call it in `delay_s` seconds."""
        self.at(self.clock.now() + delay_s, call)

    def run(self, until_s: float) -> None:
        """Let time pass."""
        while self._due and self._due[0][0] <= until_s:
            time_s, _, call = heapq.heappop(self._due)
            self.clock.advance(max(0.0, time_s - self.clock.now()))
            call()
        self.clock.advance(until_s - self.clock.now())

    def offer(self, rate_s: float, until_s: float, tenants: list[Tenant], lengths: Lengths) -> None:
        """Let requests arrive at random (Poisson) from now until then, `rate_s` a second."""

        def arrive() -> None:
            if self.clock.now() < until_s:
                self.arrive(self._draw(tenants), lengths)
                self.after(self.random.expovariate(rate_s), arrive)

        self.after(self.random.expovariate(rate_s), arrive)

    def saturate(self, num_requests: int, tenants: list[Tenant], lengths: Lengths) -> None:
        """Keep `num_requests` requests in the cluster: one comes for each that ends."""

        def arrive() -> None:
            self.arrive(self._draw(tenants), lengths)

        self._on_end = arrive
        for _ in range(num_requests):
            arrive()

    def arrive(self, tenant: Tenant, lengths: Lengths) -> VirtualRequest:
        """Let a request arrive now, as `RequestManager` takes it."""
        now = self.clock.now()
        request = VirtualRequest(str(len(self.requests)), tenant, *lengths.draw(self.random), now)
        self.requests.append(request)
        route_request = RouteRequest(
            request.request_id, RequestFacts(tenant.name), (), request.num_prompt, lengths.most_output
        )
        if not self._has_admission:
            self.submit(request, self.router.route(route_request))
            return request
        queued = QueuedRequest(
            request.request_id, Flow(tenant.name, tenant.service_class), now, weight=tenant.weight
        )
        try:
            self.admission.check_early(queued, 4 * request.num_prompt)
            capped = self.admission.max_tokens(tenant.service_class, lengths.most_output)
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

    def on_frame(self, replica: VirtualReplica, state: QueueState, news: _News) -> None:
        """Take the results of a step of a replica."""
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
        self.after(NETWORK_S, lambda: compute.submit(request, decode_id))

    def _report(self, replica: VirtualReplica) -> None:
        self.router.loads.on_load(replica.load())
        self.after(REPORT_S, lambda: self._report(replica))

    def _on_rung(self, rung: Rung) -> None:
        self.rungs.append((self.clock.now(), rung))
        self.is_batch_paused = rung >= Rung.BATCH_PAUSED

    def _draw(self, tenants: list[Tenant]) -> Tenant:
        return self.random.choices(tenants, [it.part for it in tenants])[0]


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)
