"""Counts what a gateway measures of its requests, for metrics, console and scaler."""

from __future__ import annotations

import bisect
import dataclasses
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cluster.metrics.admission_stats import FlowStats
from cluster.metrics.curves import CURVE_S, RING_S, Curves, SecondRing, Window, curves_of, window_of
from cluster.metrics.ended_request import EndedRequest, Summary
from cluster.metrics.metric import REQUEST_TIMES
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.text.preprocess import PreparedRequest
from kvtransfer.blocks.keys import TOKEN_BYTES
from router.messages import Decision
from workers.messages.link import PrefillReport, TokenDelta

_NO_CAPACITY = "resource_exhausted"
# A replica that is gone keeps its histograms for so long after its last request.
_FORGET_S = 600.0


class Histogram:
    """Totals for Prometheus: how many values were at most each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add the value `count` times."""
        self._counts[bisect.bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def num_values(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """(`le`, count of values up to it) for each bound and for `+Inf`, as Prometheus writes them."""
        return cumulative(self.bounds, self._counts)


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, int]]:
    """The same, of counts by bucket; the last bucket is what exceeds every bound."""
    assert len(counts) == len(bounds) + 1
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    sums: list[tuple[str, int]] = []
    so_far = 0
    for name, count in zip(names, counts, strict=True):
        so_far += count
        sums.append((name, so_far))
    return sums


class Predicted(NamedTuple):
    """Seconds from arrival to the first token, and of a decode step; 0: nothing was predicted."""

    ttft_s: float = 0.0
    step_s: float = 0.0


NOT_PREDICTED = Predicted()


@dataclass(slots=True)
class _Open:
    """A request that runs."""

    tenant: str
    started_at: float
    num_prompt_tokens: int
    predicted: Predicted
    num_output_tokens: int = 0
    sample_to_num_tokens: Counter[int] = field(default_factory=Counter)
    sample_to_last_at: dict[int, float] = field(default_factory=dict)
    # Up to when its KV is accounted for; None: it holds none yet.
    held_since: float | None = None


class ReplicaCounters:
    """The times of requests by the replica that did the work, in seconds."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.used_at = 0.0
        # By metric name.
        self.histograms = {name: Histogram(bounds) for name, bounds in REQUEST_TIMES.items()}
        # By code of `RequestFailed`.
        self.num_attempt_failures: Counter[str] = Counter()
        # Attempts that the router placed here, by side: "prefill", "decode", or "local" for both.
        self.num_routed: Counter[str] = Counter()


class GatewayCounters:
    """Totals since the gateway's start, and the last minutes second by second.

    Every `now` is the gateway's monotonic clock in seconds. `pool_of` returns the pool of a replica id ("":
    no longer known), `token_bytes` the bytes of KV of one token (0: not known yet).
    """

    def __init__(
        self,
        pool_of: Callable[[str], str],
        token_bytes: Callable[[], int],
        *,
        ttft_slo_s: float = math.inf,
        itl_slo_s: float = math.inf,
    ) -> None:
        """What is slower than the two objectives counts as late."""
        self._pool_of = pool_of
        self._token_bytes = token_bytes
        self._ttft_slo_s = ttft_slo_s
        self._itl_slo_s = itl_slo_s
        self._open: dict[str, _Open] = {}
        self.seconds = SecondRing()
        # By replica id.
        self.replicas: dict[str, ReplicaCounters] = {}
        # By state ("finished", "failed", "cancelled", "refused": never accepted) and gRPC status.
        self.num_requests: Counter[tuple[str, str]] = Counter()
        # Finished requests that took more than one attempt.
        self.num_retried = 0
        # Links that ended to replicas that were not leaving, by pool.
        self.num_losses: Counter[str] = Counter()
        # Changes of circuit breakers, by pool and the state that came.
        self.num_breaker_changes: Counter[tuple[str, str]] = Counter()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        # Prompt tokens by the tier where their KV was when the request came.
        self.num_cached_tokens: Counter[str] = Counter()
        # By transport ("none": nothing had to move).
        self.num_hand_overs: Counter[str] = Counter()
        self.num_hand_over_bytes: Counter[str] = Counter()
        # Of all attempts that ended: what the router expected to be cached where it placed the prompt.
        self.num_expected_cached_tokens = 0
        self.tenants = TenantUsageTable()
        self.demand = Demand()
        # The part of the tenants' limits that this gateway and those whose use it knows may give out.
        self.quota_share = 1.0

    # ------------------------------------------------------------------------- from the request manager

    def arrived(self, plan: PreparedRequest, now: float, predicted: Predicted = NOT_PREDICTED) -> None:
        """A request was accepted."""
        num_prompt_tokens = len(plan.prompt) // TOKEN_BYTES
        self._open[plan.request_id] = _Open(plan.tenant, now, num_prompt_tokens, predicted)
        self.num_prompt_tokens += num_prompt_tokens
        self.tenants.use(plan.tenant).num_prompt_tokens += num_prompt_tokens
        self.demand.num_arrived += 1
        self.demand.num_sequences += len(plan.samples)
        counts = self.seconds.second(now).counts
        counts["num_arrived"] += 1
        counts["num_prompt_tokens"] += num_prompt_tokens

    def prefilled(self, report: PrefillReport, replica_id: str, now: float) -> None:
        """A prompt, or what had to be computed again of a request, is there: this replica has computed it."""
        open_ = self._open.get(report.request_id)
        if open_ is None:
            return
        tier_to_cached = cached_by_tier(report)
        num_cached = sum(tier_to_cached.values())
        num_computed = max(0, report.num_prompt_tokens - num_cached)
        self.num_cached_tokens.update(tier_to_cached)
        second = self.seconds.second(now)
        second.counts["num_computed_tokens"] += num_computed
        second.pool_to_prompts[self._pool_of(replica_id)] += 1
        self.demand.prompt(num_computed)
        use = self.tenants.use(open_.tenant)
        use.num_cached_tokens += num_cached
        use.num_computed_tokens += num_computed
        if open_.held_since is None:
            times = report.times
            span_s = times.prefilled - times.scheduled if times.scheduled and times.prefilled else 0.0
            open_.held_since = now - max(0.0, span_s)

    def streamed(self, replica_id: str, delta: TokenDelta, now: float) -> None:
        """New tokens of a request arrived from a replica."""
        open_ = self._open.get(delta.request_id)
        num_tokens = len(delta.tokens) // TOKEN_BYTES
        if open_ is None or num_tokens == 0:
            return
        self._hold(open_, now)
        is_first = open_.num_output_tokens == 0
        open_.num_output_tokens += num_tokens
        open_.sample_to_num_tokens[delta.sample] += num_tokens
        self.num_output_tokens += num_tokens
        self.tenants.use(open_.tenant).num_output_tokens += num_tokens
        second = self.seconds.second(now)
        second.counts["num_output_tokens"] += num_tokens
        last_at = open_.sample_to_last_at.get(delta.sample)
        open_.sample_to_last_at[delta.sample] = now
        if is_first:
            ttft_s = now - open_.started_at
            second.ttft.add(ttft_s)
            self.demand.first_token(ttft_s > self._ttft_slo_s)
            self._observe(replica_id, "ttft_seconds", ttft_s, now)
            if open_.predicted.ttft_s > 0:
                self._observe(replica_id, "ttft_prediction_ratio", ttft_s / open_.predicted.ttft_s, now)
        elif last_at is not None:
            gap_s = (now - last_at) / num_tokens
            second.itl.add(gap_s, num_tokens)
            self.demand.gaps(num_tokens, gap_s > self._itl_slo_s)
            self._observe(replica_id, "itl_seconds", gap_s, now, num_tokens)

    def over_quota(self, tenant: str, limit: str) -> None:
        """A request was refused because its tenant has used up this field of `TenantLimits`."""
        self.tenants.use(tenant).num_over_quota[limit] += 1

    def lost(self, pool: str) -> None:
        """The Link to a replica of this pool ended, and it had not said that it leaves."""
        self.num_losses[pool] += 1

    def breaker_changed(self, pool: str, state: str) -> None:
        """The circuit breaker of a replica of this pool changed to `state`."""
        self.num_breaker_changes[pool, state] += 1

    def attempt_failed(self, replica_id: str, code: str, now: float) -> None:
        """A replica gave an attempt up; `code` as in `RequestFailed`."""
        counters = self._of(replica_id, now)
        if counters is not None:
            counters.num_attempt_failures[code] += 1

    def ended(self, request: EndedRequest) -> None:
        """Count a request that ended or was not accepted; an `Observer` of the request manager."""
        now = request.ended_at
        self._count_end(request.state, request.code.lower(), now)
        open_ = self._open.pop(request.wire_id, None)
        if open_ is None:
            return
        self._hold(open_, now)
        self.tenants.use(open_.tenant).num_requests += 1
        self.tenants.used(open_.tenant, open_.num_prompt_tokens + open_.num_output_tokens)
        self.demand.ended(open_.sample_to_num_tokens.values())
        for routed in request.decisions:
            self._count_routed(routed.decision, now)
        if request.state == "finished" and request.summary is not None:
            self.num_retried += request.summary.num_attempts > 1
            self._observe_stages(request.summary, open_, now)

    # ---------------------------------------------------------------------------------- to readers

    @property
    def num_running(self) -> int:
        return len(self._open)

    def num_ended(self, state: str) -> int:
        """Requests that ended in this state."""
        return sum(count for (ended, _), count in self.num_requests.items() if ended == state)

    def advance(self, now: float) -> None:
        """Account for the KV that is held now, and forget replicas that are long gone."""
        for open_ in self._open.values():
            self._hold(open_, now)
        for replica_id, counters in list(self.replicas.items()):
            if now > counters.used_at + _FORGET_S and not self._pool_of(replica_id):
                del self.replicas[replica_id]

    def curves(self, now: float, wall: float) -> Curves:
        """Of the last 5 minutes; `wall` is the unix time of `now`."""
        return curves_of(self.seconds.since(now - CURVE_S), now, wall)

    def window(self, now: float, window_s: float = 60.0) -> Window:
        """The sum of the last `window_s` seconds, at most `RING_S`."""
        return window_of(self.seconds.since(now - RING_S - 1), now, window_s)

    # ------------------------------------------------------------------------------------- private

    def _count_routed(self, decision: Decision, now: float) -> None:
        self.num_expected_cached_tokens += decision.prefill_cached_tokens
        placed = [("prefill", decision.prefill), ("decode", decision.decode)]
        for side, replica_id in placed if decision.prefill else [("local", decision.decode)]:
            counters = self._of(replica_id, now)
            if counters is not None:
                counters.num_routed[side] += 1

    def _count_end(self, state: str, code: str, now: float) -> None:
        self.num_requests[state, code] += 1
        counts = self.seconds.second(now).counts
        if state == "finished":
            counts["num_finished"] += 1
        elif state != "cancelled":
            counts["num_failed"] += 1
        if code == _NO_CAPACITY:
            counts["num_refused"] += 1

    def _observe_stages(self, summary: Summary, open_: _Open, now: float) -> None:
        prefill, decode = summary.prefill_replica, summary.decode_replica
        self._observe(decode, "e2e_seconds", summary.e2e_s, now)
        num_later_tokens = max(open_.sample_to_num_tokens.values(), default=0) - 1
        if num_later_tokens > 0:
            tpot_s = summary.decode_s / num_later_tokens
            self._observe(decode, "tpot_seconds", tpot_s, now)
            if open_.predicted.step_s > 0:
                self._observe(decode, "tpot_prediction_ratio", tpot_s / open_.predicted.step_s, now)
        if summary.prefill is not None:
            self._observe(prefill, "queue_seconds", summary.queue_s, now)
            self._observe(prefill, "prefill_seconds", summary.prefill_s, now)
        if summary.hand_over is not None:
            transport = summary.hand_over.transport or "none"
            self.num_hand_overs[transport] += 1
            self.num_hand_over_bytes[transport] += summary.hand_over.num_moved_bytes
            self._observe(decode, "hand_over_seconds", summary.transfer_s, now)

    def _observe(self, replica_id: str, name: str, value: float, now: float, count: int = 1) -> None:
        counters = self._of(replica_id, now)
        if counters is not None:
            counters.histograms[name].observe(value, count)

    def _of(self, replica_id: str, now: float) -> ReplicaCounters | None:
        counters = self.replicas.get(replica_id)
        if counters is None:
            if not replica_id:
                return None
            counters = self.replicas[replica_id] = ReplicaCounters(self._pool_of(replica_id))
        counters.used_at = now
        return counters

    def _hold(self, open_: _Open, now: float) -> None:
        """Account for its KV up to now: of the prompt and of the output so far, once for all samples."""
        if open_.held_since is not None:
            held_bytes = (open_.num_prompt_tokens + open_.num_output_tokens) * self._token_bytes()
            self.tenants.use(open_.tenant).kv_byte_s += held_bytes * (now - open_.held_since)
            open_.held_since = now


def cached_by_tier(report: PrefillReport) -> dict[str, int]:
    """Cached tokens of the prompt, by where each one's KV was when the request came: what the store brought
    is on the device since."""
    num_loaded = min(sum(report.num_loaded_tokens.values()), report.num_cached_tokens)
    return {"device": report.num_cached_tokens - num_loaded, **report.num_loaded_tokens}


# ----------------------------------------------------------------------------------------------
# What each tenant costs: tokens, and KV held over time. Few tenants have series of their own.

# The tenant label of all that have no series of their own.
OTHERS = "other"
# Tenants that are watched for more use, in units of the limit.
_NUM_CANDIDATES = 4
# Names that ever get a series in a gateway's life, in units of the limit.
_MOST_NAMES = 5
# A tenant takes another's place when it has used this many times as much.
_MARGIN = 2.0


@dataclass(slots=True)
class TenantUse:
    """The use of one tenant since it has a series; all fields only grow."""

    num_requests: int = 0
    # Refused requests by the limit that was used up.
    num_over_quota: Counter[str] = field(default_factory=Counter)
    # Of accepted requests, whatever became of them.
    num_prompt_tokens: int = 0
    # Prompt tokens that were computed.
    num_computed_tokens: int = 0
    # Prompt tokens whose KV was there.
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    # Bytes of KV that its requests held, times seconds.
    kv_byte_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.num_computed_tokens + self.num_cached_tokens + self.num_output_tokens


class TenantUsageTable:
    """The use of each tenant, for at most `limit` of them at once by name; the others together.

        unknown --first use, below the limit--> named <-- twice the least named one's tokens, name allowed
           |                                      |                                            |
           +---at the limit---> candidate         +--(another takes its place)--> forgotten    candidate

    Every series only grows: what a tenant used while it had none stays with the others, and one that gets
    its series back continues from its old total.
    """

    def __init__(self, limit: int = 20) -> None:
        assert limit > 0
        self._limit = limit
        self._named: dict[str, TenantUse] = {}
        self._others = TenantUse()
        # Tokens since it is watched.
        self._candidates: dict[str, int] = {}
        # All that ever had a series.
        self._ever: dict[str, TenantUse] = {}

    def use(self, tenant: str) -> TenantUse:
        """Return where to add what the tenant uses; call it again for each use."""
        name = tenant or "default"
        if name == OTHERS:
            return self._others
        found = self._named.get(name)
        if found is None and len(self._named) < self._limit and len(self._ever) < self._limit:
            found = self._name(name)
        return self._others if found is None else found

    def used(self, tenant: str, num_tokens: int) -> None:
        """Add what one of its requests used: a tenant among the others may now earn a series."""
        name = tenant or "default"
        if name in self._named or name == OTHERS:
            return
        so_far = self._candidates.pop(name, 0) + num_tokens
        if len(self._candidates) >= _NUM_CANDIDATES * self._limit:
            least = min(self._candidates, key=self._candidates.__getitem__)
            so_far += self._candidates.pop(least)  # it may have been the one that was dropped before
        self._candidates[name] = so_far
        smallest = min(self._named, key=lambda each: self._named[each].num_tokens)
        is_allowed = name in self._ever or len(self._ever) < _MOST_NAMES * self._limit
        if is_allowed and so_far > _MARGIN * self._named[smallest].num_tokens:
            del self._named[smallest], self._candidates[name]
            self._name(name)

    def series(self) -> dict[str, TenantUse]:
        """By label value."""
        return {**self._named, OTHERS: self._others}

    def _name(self, name: str) -> TenantUse:
        use = self._named[name] = self._ever.setdefault(name, TenantUse())
        return use


# ----------------------------------------------------------------------------------------------
# Demand: what was asked of gateways and how it was served, the totals that the autoscaler forecasts from.


@dataclass(slots=True)
class Demand:
    """Totals of one gateway since its start, or of all gateways between two samples; the fields are those of
    `tandem.v1.Demand`, which describes them."""

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
    num_refused: int = 0

    def prompt(self, num_computed_tokens: int) -> None:
        """Count a prompt whose prefill was reported."""
        self.num_prompts += 1
        self.num_computed_tokens += num_computed_tokens
        self.computed_tokens_squared += num_computed_tokens**2

    def ended(self, output_lengths: Iterable[int]) -> None:
        """Count the continuations of a request that ended, each after so many tokens."""
        for num_tokens in output_lengths:
            self.num_ended += 1
            self.num_output_tokens += num_tokens
            self.output_tokens_squared += num_tokens**2

    def first_token(self, is_late: bool) -> None:
        """Count the first token of a request."""
        self.num_first_tokens += 1
        self.num_late_first_tokens += is_late

    def gaps(self, num_gaps: int, are_late: bool) -> None:
        """Count the gaps before further tokens of a continuation."""
        self.num_gaps += num_gaps
        self.num_late_gaps += num_gaps * are_late

    def values(self) -> tuple[float, ...]:
        """The fields in their order."""
        return _values(self)

    def plus(self, other: Demand) -> Demand:
        """The sum of both."""
        return Demand(*(mine + its for mine, its in self._pairs(other)))

    def since(self, before: Demand) -> Demand:
        """The difference. Where a counter decreased, the gateway was restarted and all its values are new."""
        pairs = self._pairs(before)
        has_restarted = any(now < then for now, then in pairs)
        return self if has_restarted else Demand(*(now - then for now, then in pairs))

    def _pairs(self, other: Demand) -> list[tuple[Any, Any]]:
        return list(zip(_values(self), _values(other), strict=True))


_NAMES = tuple(field.name for field in dataclasses.fields(Demand))
_values = operator.attrgetter(*_NAMES)


def demand_message(demand: Demand) -> admin_pb.Demand:
    """The public message."""
    return admin_pb.Demand(**dict(zip(_NAMES, _values(demand), strict=True)))


def demand_of(message: admin_pb.Demand) -> Demand:
    """The totals in the public message."""
    return Demand(*(getattr(message, name) for name in _NAMES))


# ----------------------------------------------------------------------------------------------
# What each tenant and class was given lately, of the time of the replicas.

# Time given so long ago counts 1/e: who is given half of a replica has 30 s.
SERVED_S = 60.0
# Tenants that are shown by name.
NUM_TENANTS = 20
# Tenants that are counted by name: more than are shown, so that one whose use grows is noticed.
MOST_TENANTS = 200
# Before the common factor of new numbers becomes too large, all are brought up to date.
_RENEW_S = 20 * SERVED_S
# What is less is forgotten.
_LEAST_S = 1e-3


class ServedTime:
    """Seconds of the replicas' time that each tenant and class was given; what is long ago counts less. At
    most `MOST_TENANTS` are counted by name, and the others together. Time is an argument."""

    def __init__(self) -> None:
        # As they were worth at `_counted_at`: later ones are worth more.
        self._tenants: dict[str, defaultdict[str, float]] = {}
        self._counted_at = 0.0
        self._given_at = -math.inf

    def __len__(self) -> int:
        """How many tenants are counted by name, and the others as one."""
        return len(self._tenants)

    def add(self, tenant: str, service_class: str, cost_s: float, now: float) -> None:
        """Count a request that goes to its replica."""
        if now - self._counted_at > _RENEW_S:
            self._renew(now)
        self._given_at = now
        name = tenant or "default"
        if name not in self._tenants and len(self._tenants) > MOST_TENANTS:
            self._tenants = _largest(self._tenants, MOST_TENANTS // 2)
        served = self._tenants.setdefault(name, defaultdict(float))
        served[service_class] += cost_s * math.exp((now - self._counted_at) / SERVED_S)

    def stats(self, now: float) -> tuple[FlowStats, ...]:
        """Return what the tenants have that were given most, then those of the others together. Nothing,
        where nobody was given anything for `SERVED_S`: all fade alike, so that their shares would stay."""
        if now - self._given_at > SERVED_S:
            return ()
        kept = math.exp((self._counted_at - now) / SERVED_S)
        return tuple(
            FlowStats(tenant, service_class, served_s * kept)
            for tenant, served in _largest(self._tenants, NUM_TENANTS).items()
            for service_class, served_s in served.items()
            if served_s * kept >= _LEAST_S
        )

    def _renew(self, now: float) -> None:
        kept = math.exp((self._counted_at - now) / SERVED_S)
        self._counted_at = now
        renewed: dict[str, defaultdict[str, float]] = {}
        for tenant, served in self._tenants.items():
            if sum(served.values()) * kept >= _LEAST_S:
                renewed[tenant] = defaultdict(float, {name: value * kept for name, value in served.items()})
        self._tenants = renewed


def _largest(tenants: dict[str, defaultdict[str, float]], limit: int) -> dict[str, defaultdict[str, float]]:
    """Return the `limit` tenants that were given most, the first of all first, and the others as one."""
    names = sorted(
        (name for name in tenants if name != OTHERS), key=lambda name: -sum(tenants[name].values())
    )
    others: defaultdict[str, float] = defaultdict(float)
    for name in [*names[limit:], *({OTHERS} & tenants.keys())]:
        for service_class, served_s in tenants[name].items():
            others[service_class] += served_s
    largest = {name: tenants[name] for name in names[:limit]}
    return {**largest, OTHERS: others} if others else largest
