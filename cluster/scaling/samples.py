"""Samples of all replicas and of the demand, one a tick, for a bounded time: the data that the policy looks
at.

Gateways report a `tandem.v1.StatusResponse` each. A `ReplicaSample` is a `Replica` with its `Load`, as the
gateway that heard of it last reported it, and with what all gateways hold for it; the demand of a sample is
the sum over all gateways since the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cluster.metrics.demand import Demand
from cluster.roster.messages import ScalingChange
from cluster.scaling.config import PoolLimits
from workers.stats_record import ReplicaStats

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
# How long a replica takes to be ready, until one was seen to start.
_DEFAULT_START_S = 30.0
# Older statistics of a replica say nothing.
_MAX_AGE_S = 10.0


class ReplicaSample(ReplicaStats, frozen=True, kw_only=True):
    """The statistics of a ready replica at one moment, as far as the status has them."""

    replica_id: str
    pool: str
    # The role in effect; the replica's pool has its home role.
    role: str
    # How old the statistics are.
    age_s: float = 0.0
    # The sequences among `num_waiting` that gateways hold until the replica can decode them.
    num_held_sequences: int = 0

    @property
    def is_known(self) -> bool:
        """Whether its load was reported not long ago."""
        return self.num_total_blocks > 0 and self.age_s <= _MAX_AGE_S

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or comes."""
        return self.is_known and not (
            self.num_running or self.num_waiting or self.num_landings or self.num_backlog_tokens
        )


class DemandMeter:
    """Sums the counters of all gateways, and returns the demand since the last call."""

    def __init__(self) -> None:
        self._latest: dict[str, Demand] = {}
        self._sum = Demand()

    def add(self, gateway: str, totals: Demand) -> None:
        """Add the totals of a gateway; `gateway` names it with its epoch. Its counts from before it was first
        heard are left out."""
        before = self._latest.get(gateway)
        if before is not None:
            self._sum = self._sum.plus(totals.since(before))
        self._latest[gateway] = totals

    def keep(self, gateways: Sequence[str]) -> None:
        """Forget all others."""
        self._latest = {name: totals for name, totals in self._latest.items() if name in gateways}

    def take(self) -> Demand:
        """Return the demand since the last call."""
        taken, self._sum = self._sum, Demand()
        return taken


class ScalingSample(NamedTuple):
    """A look at everything."""

    # Unix time, as in `ScalingChange`.
    at: float
    # The desired number of replicas by pool.
    desired: dict[str, int]
    # The replicas in state "ready": connected, and not leaving.
    replicas: tuple[ReplicaSample, ...]
    # The demand since the sample before.
    demand: Demand

    def num_ready(self, pool: str) -> int:
        """Return the number of the pool's own ready replicas, including those in another role."""
        return sum(replica.pool == pool for replica in self.replicas)


class PoolView(NamedTuple):
    """The policy's knowledge of a pool besides the samples."""

    name: str
    # The pool's home role.
    role: str
    desired: int
    # How many sequences a step of one replica may hold: `engine.max_sequences`, or what it is where that is
    # `auto`.
    max_sequences: int
    block_tokens: int
    # None: the autoscaler does not move it.
    limits: PoolLimits | None = None
    is_pinned: bool = False
    # Unix time of its latest growth, by whomever; None: not known of any.
    grew_at: float | None = None
    changed_at: float | None = None
    # The pool's replicas that hold a lease for another role: id, and Unix time since when.
    assigned: tuple[tuple[str, float], ...] = ()
    # The time per output token that its engine keeps while it computes prompts that the router sends there;
    # None: it has no objective, or the router's policy does not price prompts by it.
    tpot_objective_s: float | None = None


def may_prefill(pools: Sequence[PoolView]) -> bool:
    """Whether any pool computes prompts for others; without one, decode pools compute their own."""
    return any(pool.role in (PREFILL, BOTH) for pool in pools)


def kind_of(role: str, *, has_prefill: bool) -> str:
    """Return the kind of work of a role in this cluster."""
    return BOTH if role == DECODE and not has_prefill else role


def last_changes(pool: str, moves: Sequence[ScalingChange]) -> tuple[float | None, float | None]:
    """Return `grew_at` and `changed_at` of a pool, from the moves of all pools; changes of a role do not
    count."""
    own = [move for move in moves if move.pool == pool and move.after != move.before]
    grown = [move.at for move in own if move.after > move.before]
    return max(grown, default=None), max((move.at for move in own), default=None)


class History:
    """The samples of the last `span_s` seconds, oldest first."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._samples: deque[ScalingSample] = deque()
        # Counts that were ordered and are not ready, by pool, with the time when each was seen first.
        self._ordered: dict[str, list[tuple[int, float]]] = {}
        self._start_s: dict[str, float] = {}
        self._max_sequences: dict[str, int] = {}

    def add(self, sample: ScalingSample) -> None:
        """Add a sample. Times grow; a sample from before the latest one (the clock was set back) starts a new
        history."""
        if self._samples and sample.at <= self._samples[-1].at:
            self._samples.clear()
            self._ordered.clear()
        self._samples.append(sample)
        while self._samples[0].at < sample.at - self._span_s:
            self._samples.popleft()
        for pool, desired in sample.desired.items():
            self._watch_start(pool, desired, sample)
        smallest: dict[str, int] = {}
        for replica in sample.replicas:
            if most := replica.max_sequences:
                smallest[replica.pool] = min(smallest.get(replica.pool, most), most)
        self._max_sequences |= smallest

    def _watch_start(self, pool: str, desired: int, sample: ScalingSample) -> None:
        """Measure from each order to its last replica's being ready."""
        num_ready, ordered = sample.num_ready(pool), self._ordered.setdefault(pool, [])
        while ordered and ordered[-1][0] > desired:
            ordered.pop()
        if desired > max(num_ready, ordered[-1][0] if ordered else 0):
            ordered.append((desired, sample.at))
        while ordered and ordered[0][0] <= num_ready:
            self._start_s[pool] = sample.at - ordered.pop(0)[1]

    def start_s(self, pool: str) -> float:
        """Return how long the last order for the pool took until its replicas were ready."""
        return self._start_s.get(pool, _DEFAULT_START_S)

    def max_sequences(self, pool: str) -> int | None:
        """Return how many sequences a step may hold at every replica of the pool that reported last; None
        where none has yet."""
        return self._max_sequences.get(pool)

    @property
    def latest(self) -> ScalingSample | None:
        return self._samples[-1] if self._samples else None

    @property
    def covered_s(self) -> float:
        """The time from the oldest sample to the latest."""
        return self._samples[-1].at - self._samples[0].at if self._samples else 0.0

    def since(self, at: float) -> list[ScalingSample]:
        """Return the samples from this time on, oldest first."""
        found = []
        for sample in reversed(self._samples):
            if sample.at < at:
                break
            found.append(sample)
        return found[::-1]

    def __iter__(self) -> Iterator[ScalingSample]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)
