"""What the policy looks at: samples of all replicas and of the demand, one a tick, for a bounded time."""

# Who fills what:
# - `cluster.scaling.observation` makes a `Sample` of the `tandem.v1.StatusResponse` of all gateways: a
#   `ReplicaSample` is a `Replica` with its `Load`, of the gateway that heard of it last (least `age_s`);
#   `Sample.demand` is what a `DemandMeter` makes of the `StatusResponse.demand` of each gateway.
# - The gateway's meters (`cluster.metrics.gateway_counters`) count `StatusResponse.demand`: all twelve fields of
#   `tandem.v1.Demand`, since the gateway's start.
# - The brain's load report has `num_waiting_landings`, which the gateway copies to `Load`.

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cluster.roster.messages import ScalingMove
from cluster.scaling.config import PoolLimits
from workers.messages import ReplicaStats

# How long a replica takes to be ready, until one was seen to start.
_DEFAULT_START_S = 30.0
# Figures of a replica that are older tell nothing.
_MAX_AGE_S = 10.0


class ReplicaSample(ReplicaStats, frozen=True, kw_only=True):
    """The statistics of a ready replica at one moment, as far as the status has them."""

    replica_id: str
    pool: str
    # The one in effect; its pool has its home role.
    role: str
    # How old the statistics are.
    age_s: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it has told its load, and lately."""
        return self.num_total_blocks > 0 and self.age_s <= _MAX_AGE_S

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or comes."""
        return self.is_known and not (
            self.num_running or self.num_waiting or self.num_landings or self.num_backlog_tokens
        )


class Demand(NamedTuple):
    """What was asked and how it was served; fields as in `tandem.v1.Demand`. Of one gateway since its start,
    or, in a sample, of all gateways since the last sample."""

    num_arrived: int = 0
    num_sequences: int = 0
    num_prompts: int = 0
    num_computed_tokens: int = 0
    computed_tokens_squared: float = 0.0
    num_ended: int = 0
    num_output_tokens: int = 0
    output_tokens_squared: float = 0.0
    num_first_tokens: int = 0
    num_late_first_tokens: int = 0
    num_gaps: int = 0
    num_late_gaps: int = 0

    def plus(self, other: Demand) -> Demand:
        return Demand._make(mine + its for mine, its in zip(self, other, strict=True))

    def since(self, before: Demand) -> Demand:
        """The difference; where a counter went back the gateway began anew, and its values are all new."""
        pairs = list(zip(self, before, strict=True))
        has_restarted = any(now < then for now, then in pairs)
        return self if has_restarted else Demand._make(now - then for now, then in pairs)


class DemandMeter:
    """Sums the counters of all gateways, and says what came since it was last asked."""

    def __init__(self) -> None:
        self._latest: dict[str, Demand] = {}
        self._sum = Demand()

    def add(self, gateway: str, totals: Demand) -> None:
        """`gateway` names it with its epoch. What it counted before it was first heard is not of now."""
        before = self._latest.get(gateway)
        if before is not None:
            self._sum = self._sum.plus(totals.since(before))
        self._latest[gateway] = totals

    def keep(self, gateways: Sequence[str]) -> None:
        """Forget all others."""
        self._latest = {name: totals for name, totals in self._latest.items() if name in gateways}

    def take(self) -> Demand:
        """Since the last call."""
        taken, self._sum = self._sum, Demand()
        return taken


class Sample(NamedTuple):
    """One look at everything."""

    # Unix time, as in `ScalingMove`.
    at: float
    # By pool: how many replicas are asked for.
    desired: dict[str, int]
    # Those in state "ready": connected, and not leaving.
    replicas: tuple[ReplicaSample, ...]
    # Since the sample before.
    demand: Demand

    def num_ready(self, pool: str) -> int:
        """Of its own, lent ones included."""
        return sum(replica.pool == pool for replica in self.replicas)


class PoolView(NamedTuple):
    """What the policy must know of a pool beside the samples."""

    name: str
    # Its home role.
    role: str
    desired: int
    # Of `engine`: how many sequences a step of one replica may hold.
    max_sequences: int
    block_tokens: int
    # None: the autoscaler does not move it.
    limits: PoolLimits | None = None
    is_pinned: bool = False
    # Unix time of its latest growth, by whomever; None: not known of any.
    grew_at: float | None = None
    changed_at: float | None = None
    # Its replicas that hold a lease for another role: id, and Unix time since when.
    lent: tuple[tuple[str, float], ...] = ()


def last_changes(pool: str, moves: Sequence[ScalingMove]) -> tuple[float | None, float | None]:
    """`grew_at` and `changed_at` of a pool, from the moves of all pools; changes of a role are none."""
    own = [move for move in moves if move.pool == pool and move.after != move.before]
    grown = [move.at for move in own if move.after > move.before]
    return max(grown, default=None), max((move.at for move in own), default=None)


class History:
    """The samples of the last `span_s` seconds, oldest first."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._samples: deque[Sample] = deque()
        self._starting_since: dict[str, float] = {}
        self._start_s: dict[str, float] = {}

    def add(self, sample: Sample) -> None:
        """Times grow; a sample from before the latest one (the clock was set back) starts afresh."""
        if self._samples and sample.at <= self._samples[-1].at:
            self._samples.clear()
            self._starting_since.clear()
        self._samples.append(sample)
        while self._samples[0].at < sample.at - self._span_s:
            self._samples.popleft()
        for pool, desired in sample.desired.items():
            self._watch_start(pool, desired, sample)

    def _watch_start(self, pool: str, desired: int, sample: Sample) -> None:
        """Measure from the order to the last replica's being ready."""
        if sample.num_ready(pool) < desired:
            self._starting_since.setdefault(pool, sample.at)
        elif (since := self._starting_since.pop(pool, None)) is not None:
            self._start_s[pool] = sample.at - since

    def start_s(self, pool: str) -> float:
        """How long it took at last until what was ordered for the pool was ready."""
        return self._start_s.get(pool, _DEFAULT_START_S)

    @property
    def latest(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    @property
    def covered_s(self) -> float:
        """From the oldest sample to the latest."""
        return self._samples[-1].at - self._samples[0].at if self._samples else 0.0

    def since(self, at: float) -> list[Sample]:
        """The samples from this time on, oldest first."""
        recent = []
        for sample in reversed(self._samples):
            if sample.at < at:
                break
            recent.append(sample)
        return recent[::-1]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)
