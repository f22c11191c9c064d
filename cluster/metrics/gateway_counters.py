"""Counts a gateway's measurements of its requests, for metrics, console and scaler."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from cluster.metrics.buckets import cumulative
from cluster.metrics.curves import CURVE_S, RING_S, Curves, SecondRing, Window, curves_of, window_of
from cluster.metrics.demand import Demand
from cluster.metrics.ended_request import EndedRequest, Summary
from cluster.metrics.metric import REQUEST_TIMES
from cluster.metrics.recent_outcomes import RecentOutcomes
from cluster.metrics.tenant_usage import PoolTime, TenantUsageTable
from cluster.text.preprocess import PreparedRequest
from kvtransfer.blocks.keys import TOKEN_BYTES
from router.messages import Decision
from workers.messages.link import PrefillReport, TokenDelta

_NO_CAPACITY = "resource_exhausted"
# The time for which a replica that is gone keeps its histograms after its last request.
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
        """Return (`le`, count of values up to it) for each bound and for `+Inf`, as Prometheus writes
        them."""
        return cumulative(self.bounds, self._counts)


class Predicted(NamedTuple):
    """Seconds from arrival to the first token, and of a decode step; 0: nothing was predicted."""

    ttft_s: float = 0.0
    step_s: float = 0.0


NOT_PREDICTED = Predicted()


class DeviceTimes(Protocol):
    """Says what requests take of a replica's devices (`cluster.gateway.device_time`)."""

    def of_prompt(self, replica_id: str, num_cached: int, num_computed: int) -> PoolTime:
        """Return the time to compute so many tokens behind cached ones."""

    def of_output(self, replica_id: str, num_tokens: int, num_context_tokens: int) -> PoolTime:
        """Return the time of so many output tokens of a sequence."""


class NoDeviceTimes:
    """Knows of no time."""

    def of_prompt(self, replica_id: str, num_cached: int, num_computed: int) -> PoolTime:
        return PoolTime()

    def of_output(self, replica_id: str, num_tokens: int, num_context_tokens: int) -> PoolTime:
        return PoolTime()


class RequestObjectives(NamedTuple):
    """What a good request keeps, in seconds: the time to the first token by class (a class without one has no
    objectives, and all that finishes is good), and the mean time of an output token after it."""

    class_to_ttft_s: Mapping[str, float] = MappingProxyType({})
    tpot_s: float = math.inf

    def kept_by(self, service_class: str, summary: Summary) -> bool:
        """Return whether a finished request has kept them."""
        ttft_s = self.class_to_ttft_s.get(service_class)
        return ttft_s is None or (summary.ttft_s <= ttft_s and summary.tpot_s <= self.tpot_s)


NO_OBJECTIVES = RequestObjectives()
NO_DEVICE_TIMES = NoDeviceTimes()


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
        # Histograms by metric name.
        self.histograms = {name: Histogram(bounds) for name, bounds in REQUEST_TIMES.items()}
        # Failures by code of `RequestFailed`.
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
        objectives: RequestObjectives = NO_OBJECTIVES,
        device_times: DeviceTimes = NO_DEVICE_TIMES,
    ) -> None:
        """A first token or gap that is slower than its objective counts as late, and a request that keeps the
        `objectives` as good."""
        self._objectives = objectives
        self._device_times = device_times
        self._pool_of = pool_of
        self._token_bytes = token_bytes
        self._ttft_slo_s = ttft_slo_s
        self._itl_slo_s = itl_slo_s
        self._open: dict[str, _Open] = {}
        self.seconds = SecondRing()
        # Counters by replica id.
        self.replicas: dict[str, ReplicaCounters] = {}
        # Requests by state ("finished", "failed", "cancelled", "refused": never accepted) and gRPC status.
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
        # Hand-overs by transport ("none": nothing had to move).
        self.num_hand_overs: Counter[str] = Counter()
        self.num_hand_over_bytes: Counter[str] = Counter()
        # The tokens that the router expected to be cached where it placed the prompt, over all attempts that
        # ended.
        self.num_expected_cached_tokens = 0
        # The prompts' leading tokens that any replica ever had, as far as is remembered, over the same.
        self.num_achievable_cached_tokens = 0
        self.tenants = TenantUsageTable()
        self.outcomes = RecentOutcomes()
        self.demand = Demand()
        # The part of the tenants' limits that this gateway and those whose use it knows may give out.
        self.quota_share = 1.0

    # ------------------------------------------------------------------------- from the request manager

    def arrived(self, plan: PreparedRequest, now: float, predicted: Predicted = NOT_PREDICTED) -> None:
        """Count a request that was accepted."""
        num_prompt_tokens = len(plan.prompt) // TOKEN_BYTES
        self._open[plan.request_id] = _Open(plan.facts.tenant, now, num_prompt_tokens, predicted)
        self.num_prompt_tokens += num_prompt_tokens
        self.tenants.use(plan.facts.tenant).num_prompt_tokens += num_prompt_tokens
        self.demand.num_arrived += 1
        self.demand.num_sequences += len(plan.samples)
        counts = self.seconds.second(now).counts
        counts["num_arrived"] += 1
        counts["num_prompt_tokens"] += num_prompt_tokens

    def prefilled(self, report: PrefillReport, replica_id: str, now: float) -> None:
        """Count a prompt, or the part of a request to be computed again, that this replica has computed."""
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
        use.took(self._device_times.of_prompt(replica_id, num_cached, num_computed))
        if open_.held_since is None:
            times = report.times
            span_s = times.prefilled - times.scheduled if times.scheduled and times.prefilled else 0.0
            open_.held_since = now - max(0.0, span_s)

    def streamed(self, replica_id: str, delta: TokenDelta, now: float) -> None:
        """Count new tokens of a request that arrived from a replica."""
        open_ = self._open.get(delta.request_id)
        num_tokens = len(delta.tokens) // TOKEN_BYTES
        if open_ is None or num_tokens == 0:
            return
        self._hold(open_, now)
        is_first = open_.num_output_tokens == 0
        open_.num_output_tokens += num_tokens
        open_.sample_to_num_tokens[delta.sample] += num_tokens
        self.num_output_tokens += num_tokens
        use = self.tenants.use(open_.tenant)
        use.num_output_tokens += num_tokens
        second = self.seconds.second(now)
        second.counts["num_output_tokens"] += num_tokens
        last_at = open_.sample_to_last_at.get(delta.sample)
        open_.sample_to_last_at[delta.sample] = now
        num_decoded = num_tokens - (last_at is None)  # the first one comes from the prompt
        num_context = open_.num_prompt_tokens + open_.sample_to_num_tokens[delta.sample]
        use.took(self._device_times.of_output(replica_id, num_decoded, num_context))
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
        """Count a request that was refused because its tenant has used up this field of `TenantLimits`."""
        self.tenants.use(tenant).num_over_quota[limit] += 1

    def lost(self, pool: str) -> None:
        """Count a Link to a replica of this pool that ended although the replica had not said that it
        leaves."""
        self.num_losses[pool] += 1

    def breaker_changed(self, pool: str, state: str) -> None:
        """Count a change to `state` of the circuit breaker of a replica of this pool."""
        self.num_breaker_changes[pool, state] += 1

    def attempt_failed(self, replica_id: str, code: str, now: float) -> None:
        """Count an attempt that a replica gave up; `code` as in `RequestFailed`."""
        counters = self._of(replica_id, now)
        if counters is not None:
            counters.num_attempt_failures[code] += 1

    def ended(self, request: EndedRequest) -> None:
        """Count a request that ended or was not accepted; an `Observer` of the request manager."""
        now = request.ended_at
        self._count_end(request.state, request.code.lower(), now)
        self._count_outcome(request)
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
            self.num_retried += request.summary.num_tries > 1
            self._observe_stages(request.summary, open_, now)

    # ---------------------------------------------------------------------------------- to readers

    @property
    def num_running(self) -> int:
        return len(self._open)

    def num_ended(self, state: str) -> int:
        """Return the number of requests that ended in this state."""
        return sum(count for (ended, _), count in self.num_requests.items() if ended == state)

    def advance(self, now: float) -> None:
        """Account for the KV that is held now, and forget replicas that are long gone."""
        for open_ in self._open.values():
            self._hold(open_, now)
        for replica_id, counters in list(self.replicas.items()):
            if now > counters.used_at + _FORGET_S and not self._pool_of(replica_id):
                del self.replicas[replica_id]

    def curves(self, now: float, wall: float) -> Curves:
        """Return the curves of the last 5 minutes; `wall` is the unix time of `now`."""
        return curves_of(self.seconds.since(now - CURVE_S), now, wall)

    def window(self, now: float, window_s: float = 60.0) -> Window:
        """Return the sum of the last `window_s` seconds, at most `RING_S`."""
        return window_of(self.seconds.since(now - RING_S - 1), now, window_s)

    # ------------------------------------------------------------------------------------- private

    def _count_routed(self, decision: Decision, now: float) -> None:
        self.num_expected_cached_tokens += decision.prefill_cached_tokens
        self.num_achievable_cached_tokens += decision.achievable_tokens
        placed = [("prefill", decision.prefill), ("decode", decision.decode)]
        for side, replica_id in placed if decision.prefill else [("local", decision.decode)]:
            counters = self._of(replica_id, now)
            if counters is not None:
                counters.num_routed[side] += 1

    def _count_outcome(self, request: EndedRequest) -> None:
        """Count how a request was served, unless it was refused before it had a class: as invalid."""
        if not request.service_class:
            return
        outcome = request.state
        if outcome == "finished" and request.summary is not None:
            is_good = self._objectives.kept_by(request.service_class, request.summary)
            outcome = "good" if is_good else "late"
        self.outcomes.add(request.tenant, request.service_class, outcome, request.ended_at)
        outcomes = self.tenants.use(request.tenant).class_to_outcomes[request.service_class]
        outcomes.num_requests[outcome] += 1
        if request.num_output_tokens:
            outcomes.num_output_tokens[outcome] += request.num_output_tokens

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
        """Account for a request's KV up to now: of the prompt and of the output so far, once for all
        samples."""
        if open_.held_since is not None:
            held_bytes = (open_.num_prompt_tokens + open_.num_output_tokens) * self._token_bytes()
            self.tenants.use(open_.tenant).kv_byte_s += held_bytes * (now - open_.held_since)
            open_.held_since = now


def cached_by_tier(report: PrefillReport) -> dict[str, int]:
    """Return the number of the prompt's cached tokens by the place of their KV when the request came; the KV
    that the store brought has been on the device since."""
    num_loaded = min(sum(report.num_loaded_tokens.values()), report.num_cached_tokens)
    return {"device": report.num_cached_tokens - num_loaded, **report.num_loaded_tokens}
