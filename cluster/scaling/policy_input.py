"""Everything that one decision is made from, measured once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cluster.scaling.config import ScalingConfig
from cluster.scaling.forecast import TAIL
from cluster.scaling.forecast_replicas import ExpectedLoad, ReplicaNeed, forecast_replicas
from cluster.scaling.measured_rates import (
    ArrivalRates,
    MeasuredRates,
    RequestSizes,
    larger_sizes,
    measured_arrivals,
    measured_rates,
    measured_sizes,
)
from cluster.scaling.reactive import (
    KV_NEAR_FULL,
    WINDOW_S,
    ReactiveSignals,
    Shortage,
    Side,
    late_share,
    refusals,
    side_of,
)
from cluster.scaling.samples import (
    BOTH,
    DECODE,
    PREFILL,
    History,
    PoolView,
    ScalingSample,
    kind_of,
    may_prefill,
)
from cluster.scaling.shared_prompts import PromptShares, shared_needs

# The other role that a replica may play, by home role.
OTHER_ROLE = {PREFILL: DECODE, DECODE: PREFILL}
# A pool shrinks only where the smaller one could serve this much more than the demand.
HYSTERESIS = 1.2
# Decode replicas that take this many times as long for a prompt's token have other devices. Short chunks
# beside sequences take up to twice as long as long ones.
_ALIKE = 4.0
# The share of the samples that must show that one replica less would do.
_SPARE_SHARE = 0.9


class ReplicaKind(NamedTuple):
    """The pools that do the same, and how many replicas they have and could have."""

    name: str
    pools: tuple[PoolView, ...]
    # The replicas at home, including those that play the other role.
    num_desired: int
    num_assigned: int
    num_borrowed: int
    # The smallest and the largest number that limits and operators allow; at least 1.
    least: int
    reach: int

    @property
    def num_effective(self) -> int:
        """The replicas that do this work once all that was ordered is ready."""
        return self.num_desired - self.num_assigned + self.num_borrowed


class PolicyView:
    """A moment, as `decide` sees it. There must be a latest sample."""

    def __init__(
        self,
        history: History,
        config: ScalingConfig,
        pools: Sequence[PoolView],
        latest: ScalingSample,
        now: float,
    ) -> None:
        self.history = history
        self.config = config
        self.latest = latest
        self.now = now
        self.has_prefill = may_prefill(pools)
        self.kinds = _kinds(pools, has_prefill=self.has_prefill)
        self.max_sequences = min((pool.max_sequences for pool in pools if pool.role != PREFILL), default=1)
        self.rates: MeasuredRates = measured_rates(history, config, self.max_sequences, now, self.has_prefill)
        self.sizes: RequestSizes = measured_sizes(history, now, config.forecast_s / 2)
        old = measured_sizes(history, now, config.forecast_s / 2, now - config.down_cool_down_s)
        # What must still fit after a pool shrank: a few short requests are no reason to.
        self.lasting_sizes = larger_sizes(self.sizes, old)
        self.start_s = max((history.start_s(pool.name) for pool in pools), default=0.0)
        self.work: ArrivalRates = measured_arrivals(
            history, config, min(self.start_s, config.forecast_s / 2), now
        )
        self.shortages = self.shortages_at(0)

    def shortages_at(self, num_ago: int) -> dict[str, Shortage]:
        """Return by kind the shortages that stood before the latest `num_ago` samples. A prefill queue that
        waits for decode is decode's shortage."""
        fast = self._signals(num_ago)
        found = {kind: fast.shortage(kind) for kind in self.kinds}
        if fast.is_blocked():
            found.pop(PREFILL, None)
        return {kind: shortage for kind, shortage in found.items() if shortage is not None}

    def blocked_queue(self) -> Shortage | None:
        """Return the prefill queue that stands because prompts wait for decode; it is none of `shortages`."""
        fast = self._signals()
        return fast.shortage(PREFILL) if PREFILL in self.kinds and fast.is_blocked() else None

    def _signals(self, num_ago: int = 0) -> ReactiveSignals:
        """Return the signals over the half minute before the latest `num_ago` samples."""
        samples = self.history.since(self.latest.at - WINDOW_S - num_ago * self.config.interval_s)
        return ReactiveSignals(
            samples[: len(samples) - num_ago],
            self.config,
            self.rates,
            self.sizes,
            self.max_sequences,
            self.start_s,
            self.work.expected.per_s,
            has_prefill=self.has_prefill,
            shares_prompts=self.shares_prompts,
        )

    def was_short(self, kind: str, for_s: float) -> bool:
        """Whether the kind was short in every sample since then."""
        num_since = len(self.history.since(self.now - for_s))
        return self.history.covered_s >= for_s and all(
            kind in self.shortages_at(num_ago) for num_ago in range(num_since)
        )

    def needs(self) -> dict[str, ReplicaNeed]:
        """Return by kind the replicas that the expected demand needs; None where the history is too short to
        tell."""
        if self.history.covered_s < self.config.forecast_s / 10:
            return dict.fromkeys(self.kinds, ReplicaNeed(None, ""))
        return self._needs_of(self.work.expected.per_s, self.sizes)

    def lasting_needs(self) -> dict[str, ReplicaNeed]:
        """Return the needs with the latest demand and a margin above it: no pool shrinks below these."""
        return self._needs_of(HYSTERESIS * self.work.lasting_per_s, self.lasting_sizes)

    def _needs_of(self, per_s: float, sizes: RequestSizes) -> dict[str, ReplicaNeed]:
        load = ExpectedLoad(per_s, self.work.expected.dispersion, sizes, self.rates)
        needs = forecast_replicas(load, self.config, {name: kind.reach for name, kind in self.kinds.items()})
        if self.shares_prompts:
            shares = PromptShares(self.kinds[PREFILL].least, self.kinds[DECODE].reach)
            needs = shared_needs(load, self.config, needs, shares)
        return needs

    @property
    def shares_prompts(self) -> bool:
        """Whether decode replicas compute prompts beside their sequences, within the objective, on devices
        that are about as fast."""
        if self.kinds.keys() != {PREFILL, DECODE}:
            return False
        objectives = [pool.tpot_objective_s for pool in self.kinds[DECODE].pools]
        if any(each is None or each > self.config.itl_slo_s for each in objectives):
            return False
        at_prefill, at_decode = self._token_s(PREFILL), self._token_s(DECODE)
        return not at_prefill or at_decode <= _ALIKE * at_prefill

    def _token_s(self, kind: str) -> float:
        """Return the mean time of a prompt's token at the replicas that have measured it; 0: none has."""
        known = [
            replica.prefill_token_s
            for replica in self.latest.replicas
            if replica.prefill_token_s > 0 and kind_of(replica.role, has_prefill=self.has_prefill) == kind
        ]
        return sum(known) / len(known) if known else 0.0

    def side(self, kind: str, sample: ScalingSample) -> Side:
        return side_of(sample, kind, has_prefill=self.has_prefill)

    def can_spare(self, kind: str, for_s: float, num_spared: int = 1) -> bool:
        """Return whether this many replicas less than there are would have done in the samples since then."""
        samples = self.history.since(self.now - for_s)
        num_left = self.side(kind, self.latest).num_replicas - num_spared
        if num_left < 1 or not samples or self._were_late(kind, samples):
            return False
        fitting = [self._fits(kind, self.side(kind, sample), num_left) for sample in samples]
        return sum(fitting) >= _SPARE_SHARE * len(samples)

    def _were_late(self, kind: str, samples: Sequence[ScalingSample]) -> bool:
        """Whether half as many first tokens or gaps were late, or requests refused, as may be."""
        is_late = late_share(samples, refusals) > TAIL / 2
        if kind != DECODE:
            is_late |= (
                late_share(samples, lambda each: (each.num_first_tokens, each.num_late_first_tokens))
                > TAIL / 2
            )
        if kind != PREFILL:
            is_late |= late_share(samples, lambda each: (each.num_gaps, each.num_late_gaps)) > TAIL / 2
        return is_late

    def _fits(self, kind: str, side: Side, num_left: int) -> bool:
        if not side.num_replicas:
            return True
        share = num_left / side.num_replicas
        if (
            kind != DECODE
            and side.num_backlog_tokens > side.prefill_tok_s * share * self.config.ttft_slo_s / 2
        ):
            return False
        if kind == PREFILL:
            return True
        # Streams that last long get slower with fewer replicas, but stay: the question is whether batches and
        # blocks have space for them. New arrivals are the forecast's part.
        load = self.config.target_load
        sequences = max(1.0, load * num_left * self.rates.batch)
        has_batch = side.num_running + side.num_waiting <= sequences
        return has_batch and side.num_used_blocks <= load * (1 - KV_NEAR_FULL) * share * side.num_total_blocks


def _kinds(pools: Sequence[PoolView], *, has_prefill: bool) -> dict[str, ReplicaKind]:
    found = {}
    for name in (PREFILL, DECODE, BOTH):
        own = tuple(pool for pool in pools if kind_of(pool.role, has_prefill=has_prefill) == name)
        if not own:
            continue
        num_borrowed = sum(len(pool.assigned) for pool in pools if OTHER_ROLE.get(pool.role) == name)
        found[name] = ReplicaKind(
            name,
            own,
            num_desired=sum(pool.desired for pool in own),
            num_assigned=sum(len(pool.assigned) for pool in own),
            num_borrowed=num_borrowed,
            least=max(1, sum(_least(pool) for pool in own)),
            reach=sum(_most(pool) for pool in own),
        )
    return found


def _least(pool: PoolView) -> int:
    return pool.desired if pool.limits is None or pool.is_pinned else pool.limits.min


def _most(pool: PoolView) -> int:
    if pool.limits is None or pool.is_pinned:
        return pool.desired
    return max(pool.limits.max, pool.desired)
