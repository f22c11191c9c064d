"""Simulate a cluster without engines, at which requests arrive.

The simulated replicas are service models that advance in time steps. A prompt takes its tokens over
`prefill_tok_s`, one at a time a replica, and begins when a decode replica has space for it; a decode step
takes `step.step_s(batch)`. A replica with a prompt and a batch halves its time.

This is a fluid model: it has no router and no single steps, so a day of a pool takes seconds. Where these
matter, use `cluster.simulation`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.metrics.demand import Demand
from cluster.scaling.measured_rates import StepCost
from cluster.scaling.samples import (
    BOTH,
    DECODE,
    PREFILL,
    PoolView,
    ReplicaSample,
    ScalingSample,
    kind_of,
)

TICK_S = 0.1


class Arrival(NamedTuple):
    """A request of a trace."""

    # Seconds since the trace's start.
    at: float
    # Tokens to compute.
    prompt_tokens: int
    output_tokens: int


class ServiceModel(NamedTuple):
    """A model of one replica of any role."""

    prefill_tok_s: float = 8000.0
    step: StepCost = StepCost(0.012, 0.0004)
    kv_tokens: int = 200_000
    block_tokens: int = 64
    max_sequences: int = 64
    start_s: float = 30.0


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """A request on its way."""

    arrival: Arrival
    remaining_prompt: float
    remaining_output: int
    first_at: float | None = None
    end_at: float | None = None
    # The replica where the request's KV has space.
    target: ReplayedReplica | None = None

    @property
    def kv_tokens(self) -> float:
        """The KV when the request joins its batch: the prompt and the output so far."""
        return self.arrival.prompt_tokens + self.arrival.output_tokens - self.remaining_output


@dataclass(slots=True, eq=False)
class ReplayedReplica:
    """Both sides of one engine. `progress` is how many tokens a sequence got that was there all the time."""

    replica_id: str
    pool: str
    role: str
    ready_at: float
    model: ServiceModel
    is_leaving: bool = False
    prompts: deque[ReplayedRequest] = field(default_factory=deque)
    # The sum of the prompts' tokens.
    queued_tokens: float = 0.0
    computing: ReplayedRequest | None = None
    # The next prompt to be computed: it has its space.
    granted: ReplayedRequest | None = None
    # Requests with their KV here, for a slot of the batch.
    waiting: deque[ReplayedRequest] = field(default_factory=deque)
    # A heap: progress at its end, order of joining.
    batch: list[tuple[float, int, ReplayedRequest]] = field(default_factory=list)
    progress: float = 0.0
    # KV of all requests that run here, wait or are landing, without the tokens that the batch generated since
    # each joined.
    held_tokens: float = 0.0
    # The sum over the batch.
    joined_progress: float = 0.0
    num_landings: int = 0
    # Prompts that found no space here in this time step.
    num_refused: int = 0
    num_preemptions: int = 0
    step_s: float = 0.0
    has_prefilled: bool = False

    @property
    def used_tokens(self) -> float:
        return self.held_tokens + len(self.batch) * self.progress - self.joined_progress

    @property
    def free_tokens(self) -> float:
        return self.model.kv_tokens - self.used_tokens

    @property
    def backlog_tokens(self) -> float:
        begun = (job.remaining_prompt for job in (self.computing, self.granted) if job)
        return sum(begun) + self.queued_tokens

    @property
    def is_empty(self) -> bool:
        begun = self.computing or self.granted
        return not (self.prompts or begun or self.waiting or self.batch or self.num_landings)

    def sample(self) -> ReplicaSample:
        model = self.model
        total = model.kv_tokens // model.block_tokens
        return ReplicaSample(
            replica_id=self.replica_id,
            pool=self.pool,
            role=self.role,
            num_running=len(self.batch) + (self.computing is not None),
            num_waiting=len(self.waiting) + len(self.prompts) + (self.granted is not None),
            num_landings=self.num_landings + self.num_refused,
            num_waiting_landings=self.num_refused,
            num_backlog_tokens=round(self.backlog_tokens),
            num_free_blocks=max(0, int(self.free_tokens // model.block_tokens)),
            num_total_blocks=total,
            num_preemptions=self.num_preemptions,
            prefill_tok_s=model.prefill_tok_s if self.has_prefilled else 0.0,
            decode_step_s=self.step_s,
        )


@dataclass(slots=True)
class Outcomes:
    """The outcomes of the requests; gaps are those between tokens of a sequence."""

    # The time that the replicas of each pool existed, starting and leaving ones included.
    replica_s: dict[str, float]
    jobs: list[ReplayedRequest] = field(default_factory=list)
    num_gaps: float = 0.0
    num_late_gaps: float = 0.0
    num_preemptions: int = 0


class ReplayedCluster:
    """Runs arrivals through the replicas; counts and roles are changed from outside."""

    def __init__(
        self, pools: Sequence[PoolView], model: ServiceModel, ttft_slo_s: float, itl_slo_s: float
    ) -> None:
        self.now = 0.0
        self.desired = {pool.name: pool.desired for pool in pools}
        self._home = {pool.name: pool.role for pool in pools}
        self._has_prefill = any(pool.role in (PREFILL, BOTH) for pool in pools)
        self._model = model
        self._ttft_slo_s = ttft_slo_s
        self._itl_slo_s = itl_slo_s
        self._numbers = itertools.count()
        self.replicas: list[ReplayedReplica] = []
        self._counted = Demand()
        self.outcomes = Outcomes(dict.fromkeys(self.desired, 0.0))
        for pool in pools:
            for _ in range(pool.desired):
                self._add(pool.name, ready_at=0.0)

    # ------------------------------------------------------------------------------------ orders

    def scale(self, pool: str, count: int) -> None:
        """Set the count of a pool. New replicas are ready after `start_s`; those that leave finish their
        requests."""
        self.desired[pool] = count
        own = [each for each in self.replicas if each.pool == pool and not each.is_leaving]
        for _ in range(count - len(own)):
            self._add(pool, ready_at=self.now + self._model.start_s)
        # Those that serve least go first: starting replicas, then by the KV and prompts that they hold.
        own.sort(key=lambda each: (each.ready_at <= self.now, each.used_tokens + each.backlog_tokens))
        for replica in own[: max(0, len(own) - count)]:
            replica.is_leaving = True
            self._reroute(replica)

    def set_role(self, replica_id: str, role: str) -> None:
        """Set the role of a replica, which finishes its running requests; prompts that have not begun go to
        other replicas."""
        for replica in self.replicas:
            if replica.replica_id == replica_id:
                replica.role = role
                self._reroute(replica)

    def home_role(self, pool: str) -> str:
        return self._home[pool]

    def _add(self, pool: str, ready_at: float) -> None:
        replica_id = f"{pool}-{next(self._numbers)}"
        self.replicas.append(ReplayedReplica(replica_id, pool, self._home[pool], ready_at, self._model))

    def _reroute(self, replica: ReplayedReplica) -> None:
        jobs = list(replica.prompts)
        replica.prompts.clear()
        replica.queued_tokens = 0.0
        for job in jobs:
            self._queue(job)

    # ------------------------------------------------------------------------------------ one time step

    def submit(self, arrival: Arrival) -> None:
        """Submit a request, which is at a prefill replica at once."""
        job = ReplayedRequest(arrival, arrival.prompt_tokens, arrival.output_tokens)
        self.outcomes.jobs.append(job)
        self._counted.num_arrived += 1
        self._counted.num_sequences += 1
        self._queue(job)

    def _queue(self, job: ReplayedRequest) -> None:
        """Queue a request at the replica with the least backlog; while none is ready, at one that will be."""
        able = self._of_kinds(PREFILL, BOTH) or self._starting() or self.replicas
        chosen = min(able, key=lambda each: (each.backlog_tokens, each.replica_id))
        chosen.prompts.append(job)
        chosen.queued_tokens += job.remaining_prompt

    def advance(self) -> None:
        """Advance everything by one tick."""
        for replica in self.replicas:
            replica.num_refused = 0
        for replica in list(self.replicas):
            if replica.ready_at <= self.now:
                self._work(replica)
            self.outcomes.replica_s[replica.pool] += TICK_S
        for replica in self.replicas:
            self._admit(replica)
        self.now += TICK_S
        self.replicas = [each for each in self.replicas if not (each.is_leaving and each.is_empty)]

    def _work(self, replica: ReplayedReplica) -> None:
        self._begin_prompt(replica)
        has_both = replica.computing is not None and bool(replica.batch)
        share_s = TICK_S / 2 if has_both else TICK_S
        if replica.batch:
            self._decode(replica, share_s)
        left_s = share_s
        while replica.computing is not None and left_s > 0:
            job = replica.computing
            taken_s = min(left_s, job.remaining_prompt / self._model.prefill_tok_s)
            job.remaining_prompt -= taken_s * self._model.prefill_tok_s
            left_s -= taken_s
            if job.remaining_prompt <= 1e-6:
                replica.computing = None
                self._finish_prompt(replica, job, self.now + TICK_S - left_s)
                self._begin_prompt(replica)

    def _begin_prompt(self, replica: ReplayedReplica) -> None:
        """Begin the next prompt that has space; the one after it requests space at the same time."""
        if replica.granted is None:
            self._request_space(replica)
        if replica.computing is None and replica.granted is not None:
            replica.computing, replica.granted = replica.granted, None
            self._request_space(replica)

    def _request_space(self, replica: ReplayedReplica) -> None:
        """Request space for the first prompt in line, which waits at the decode replica with the most
        space."""
        able = self._of_kinds(DECODE, BOTH)
        if not replica.prompts or not able:
            return
        job = replica.prompts[0]
        target = max(able, key=lambda each: (each.free_tokens, each.replica_id))
        reserve = (len(target.batch) + 1) * self._model.block_tokens
        if target.free_tokens < job.kv_tokens + reserve and not target.is_empty:
            target.num_refused = max(target.num_refused, 1)
            return
        replica.granted = replica.prompts.popleft()
        replica.queued_tokens -= job.remaining_prompt
        job.target = target
        target.held_tokens += job.kv_tokens
        target.num_landings += 1

    def _finish_prompt(self, replica: ReplayedReplica, job: ReplayedRequest, at: float) -> None:
        replica.has_prefilled = True
        target = job.target
        assert target is not None
        target.num_landings -= 1
        if job.first_at is None:
            job.first_at = at
            self._counted.prompt(job.arrival.prompt_tokens)
            self._counted.first_token(at - job.arrival.at > self._ttft_slo_s)
            job.remaining_output -= 1
            target.held_tokens += 1
        if job.remaining_output <= 0:
            target.held_tokens -= job.kv_tokens
            self._end(job)
        else:
            target.waiting.append(job)

    def _admit(self, replica: ReplayedReplica) -> None:
        while replica.waiting and len(replica.batch) < self._model.max_sequences:
            job = replica.waiting.popleft()
            entry = (replica.progress + job.remaining_output, next(self._numbers), job)
            heapq.heappush(replica.batch, entry)
            replica.joined_progress += replica.progress

    def _decode(self, replica: ReplayedReplica, share_s: float) -> None:
        batch = len(replica.batch)
        replica.step_s = self._model.step.step_s(batch)
        tokens = share_s / replica.step_s
        gap_s = replica.step_s * TICK_S / share_s
        is_late = gap_s > self._itl_slo_s
        num_gaps = batch * tokens
        num_late = num_gaps if is_late else 0.0
        self.outcomes.num_gaps += num_gaps
        self.outcomes.num_late_gaps += num_late
        self._counted.gaps(round(num_gaps), are_late=is_late)
        replica.progress += tokens
        while replica.batch and replica.batch[0][0] <= replica.progress:
            end, _, job = heapq.heappop(replica.batch)
            self._leave_batch(replica, end, job)
            job.remaining_output = 0
            self._end(job)
        while replica.used_tokens > self._model.kv_tokens and len(replica.batch) > 1:
            self._preempt(replica)

    def _leave_batch(self, replica: ReplayedReplica, end: float, job: ReplayedRequest) -> None:
        replica.joined_progress -= end - job.remaining_output
        replica.held_tokens -= job.kv_tokens

    def _preempt(self, replica: ReplayedReplica) -> None:
        """Make the sequence that joined last compute its prompt and output again, on any replica."""
        entry = max(replica.batch, key=lambda item: item[1])
        replica.batch.remove(entry)
        heapq.heapify(replica.batch)
        end, _, job = entry
        self._leave_batch(replica, end, job)
        replica.num_preemptions += 1
        self.outcomes.num_preemptions += 1
        job.remaining_output = max(1, round(end - replica.progress))
        job.remaining_prompt = job.kv_tokens
        self._queue(job)

    def _end(self, job: ReplayedRequest) -> None:
        job.end_at = self.now + TICK_S
        self._counted.ended([job.arrival.output_tokens])

    # ------------------------------------------------------------------------------------ what is seen

    def take_sample(self) -> ScalingSample:
        """As the scaler sees the cluster; the demand since the last call."""
        demand, self._counted = self._counted, Demand()
        samples = tuple(each.sample() for each in self._serving())
        return ScalingSample(self.now, dict(self.desired), samples, demand)

    @property
    def is_idle(self) -> bool:
        return all(each.is_empty for each in self.replicas)

    def _of_kinds(self, *kinds: str) -> list[ReplayedReplica]:
        return [
            each for each in self._serving() if kind_of(each.role, has_prefill=self._has_prefill) in kinds
        ]

    def _serving(self) -> Iterable[ReplayedReplica]:
        return (each for each in self.replicas if each.ready_at <= self.now and not each.is_leaving)

    def _starting(self) -> list[ReplayedReplica]:
        return [each for each in self.replicas if each.ready_at > self.now and not each.is_leaving]
