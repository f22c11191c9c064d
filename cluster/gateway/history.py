"""The history of a gateway's latest requests: the stages of their time, and the common parts of their
prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from cluster.gateway.prefix_reuse import MAX_TENANTS, PrefixTracker
from cluster.metrics.ended_request import EndedRequest, Summary
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.clock import Clock
from kvtransfer.common.recent_map import RecentMap

MAX_REQUESTS = 256
MAX_AGE_S = 600.0
# Tenants in a status.
NUM_TENANTS = 8


class _Hits(NamedTuple):
    """Prompt tokens of a tenant's finished requests: looked at, of them known, of them cached."""

    num_tokens: int
    num_known: int
    num_cached: int


class RequestHistory:
    """The latest requests of a gateway, bounded. `ended` is an `Observer`. Not thread-safe."""

    def __init__(self, block_tokens: int, clock: Clock) -> None:
        self._clock = clock
        self._prefixes = PrefixTracker(block_tokens)
        self._done: deque[Summary] = deque(maxlen=MAX_REQUESTS)
        self._hits: RecentMap[str, deque[_Hits]] = RecentMap(MAX_TENANTS)

    def ended(self, request: EndedRequest) -> None:
        """Record a request. However it ended, its prompt counts as known from now on, unless it is private:
        then nothing is kept of it besides times and counts."""
        prepared, summary = request.prepared, request.summary
        if prepared is None or request.state == "refused":
            return
        num_tokens = num_known = 0
        if not prepared.facts.is_private:
            num_tokens, num_known = self._prefixes.saw(
                prepared.facts.tenant,
                prepared.block_keys,
                prepared.prompt,
                request.started_at,
                request.ended_at,
            )
        if request.state != "finished" or summary is None or summary.prefill is None:
            return  # also a resumed request that missed nothing
        self._done.append(summary)
        if prepared.facts.is_private:
            return
        num_cached = min(summary.num_cached_tokens, num_tokens)
        hits = self._hits.use(prepared.facts.tenant, lambda: deque(maxlen=MAX_REQUESTS))
        hits.append(_Hits(num_tokens, num_known, num_cached))

    def summary(self) -> admin_pb.RecentRequests:
        """Return percentiles, and the stages of slow requests, of the last ten minutes."""
        oldest = self._clock.now() - MAX_AGE_S
        done = [item for item in self._done if item.finished_at >= oldest]
        if not done:
            return admin_pb.RecentRequests()
        by_ttft = sorted(done, key=lambda item: item.ttft_s)
        slow = by_ttft[-max(len(done) // 10, 1) :]
        tpots_s = sorted(tpot_s for item in done if (tpot_s := item.tpot_s))
        return admin_pb.RecentRequests(
            num_requests=len(done),
            window_s=self._clock.now() - done[0].finished_at,
            ttft_p50_ms=1e3 * percentile([item.ttft_s for item in by_ttft], 0.5),
            ttft_p90_ms=1e3 * percentile([item.ttft_s for item in by_ttft], 0.9),
            tpot_p50_ms=1e3 * percentile(tpots_s, 0.5),
            tpot_p90_ms=1e3 * percentile(tpots_s, 0.9),
            slow_ttft_ms=1e3 * _mean([item.ttft_s for item in slow]),
            slow_queue_ms=1e3 * _mean([item.queue_s for item in slow]),
            slow_prefill_ms=1e3 * _mean([item.prefill_s for item in slow]),
            slow_prompt_tokens=round(_mean([item.num_prompt_tokens for item in slow])),
            slow_cached_tokens=round(_mean([item.num_cached_tokens for item in slow])),
            transfer_p90_ms=1e3 * percentile(sorted(item.transfer_s for item in done), 0.9),
            num_retried=sum(item.num_tries > 1 for item in done),
        )

    def prefixes(self) -> list[admin_pb.PrefixReuse]:
        """Return the prefix reuse of the tenants with the most recent prompts."""
        return [self._reuse(reuse._asdict()) for reuse in self._prefixes.reuse(NUM_TENANTS)]

    def _reuse(self, fields: dict[str, Any]) -> admin_pb.PrefixReuse:
        hits = self._hits.get(fields["tenant"], ())
        return admin_pb.PrefixReuse(
            **fields,
            num_finished_tokens=sum(item.num_tokens for item in hits),
            num_finished_known_tokens=sum(item.num_known for item in hits),
            num_cached_tokens=sum(item.num_cached for item in hits),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the least of sorted values that this share of them does not exceed; 0 without values."""
    if not ordered:
        return 0.0
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
