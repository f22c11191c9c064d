"""What a simulation has found: latencies, goodput, hits, balance, use and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cluster.simulation.simulated_call import CallRecord
from cluster.simulation.simulated_cluster import SimulatedCluster

# Where a token may be found: on the device, or in a tier of the store, the cheapest first.
_TIERS = ("device", "dram", "nvme", "remote")


class SimulatedObjectives(NamedTuple):
    """What a good request keeps, in seconds."""

    ttft_s: float
    tpot_s: float

    def kept_by(self, record: CallRecord) -> bool:
        """Whether the request has all its tokens, in time."""
        return record.is_good and record.ttft_s <= self.ttft_s and record.tpot_s <= self.tpot_s


class ReplicaUse(NamedTuple):
    """What one replica has done: the time in which its steps ran, the tokens of prompts that it has computed
    and those that it has found, and the tokens that it has sent."""

    replica_id: str
    role: str
    busy_s: float
    num_computed: int
    num_found: int
    num_steps: int
    # The tokens that it has found, by the tier from which they came.
    tier_to_found: Mapping[str, int] = {}


class SimulationResult(NamedTuple):
    """What came of one simulation. Times are seconds; what no request has is 0."""

    records: Sequence[CallRecord]
    replicas: Sequence[ReplicaUse]
    span_s: float
    objectives: SimulatedObjectives
    price_per_s: float | None
    # The time of all replicas together, from their orders to their ends, and that in which steps ran.
    replica_s: float
    busy_s: float
    # What all nodes have written to NVMe.
    num_written_bytes: int = 0

    @property
    def tier_hits(self) -> dict[str, float]:
        """The tokens that were found in each tier, for each token of the prompts that replicas looked for."""
        num_queried = sum(it.num_computed + it.num_found for it in self.replicas)
        found = sum((Counter(it.tier_to_found) for it in self.replicas), Counter[str]())
        return {tier: found[tier] / num_queried if num_queried else 0.0 for tier in _TIERS}

    def as_json(self) -> dict[str, Any]:
        """Return latencies, goodput, hits and the rest as JSON values."""
        good = [record for record in self.records if record.is_good]
        ttfts, tpots = [it.ttft_s for it in good], [it.tpot_s for it in good if it.num_output > 1]
        num_kept = sum(map(self.objectives.kept_by, self.records))
        num_prompt = sum(it.num_prompt for it in good)
        num_tokens = num_prompt + sum(it.num_output for it in good)
        computing = [it.num_computed for it in self.replicas if it.role != "decode"]
        mean = sum(computing) / len(computing) if computing else 0.0
        cost = self.price_per_s
        return {
            "requests": len(self.records),
            "finished": len(good),
            "refused": sum(it.refusal == "refused" for it in self.records),
            "failed": sum(it.refusal == "failed" for it in self.records),
            "span_s": round(self.span_s, 3),
            "ttft_mean_s": _rounded(np.mean(ttfts) if ttfts else 0.0),
            "ttft_p50_s": _quantile(ttfts, 0.5),
            "ttft_p99_s": _quantile(ttfts, 0.99),
            "tpot_p50_s": _quantile(tpots, 0.5),
            "tpot_p99_s": _quantile(tpots, 0.99),
            "goodput_rps": _rounded(num_kept / self.span_s),
            "output_tok_s": _rounded(sum(it.num_output for it in good) / self.span_s),
            "hit_rate": _rounded(sum(it.num_cached for it in good) / num_prompt if num_prompt else 0.0),
            **{f"hits_{tier}": _rounded(share) for tier, share in self.tier_hits.items()},
            "nvme_written_gb": _rounded(self.num_written_bytes / 1e9),
            "imbalance": _rounded(max(computing) / mean if mean else 1.0),
            "utilization": _rounded(self.busy_s / self.replica_s),
            "replica_hours": _rounded(self.replica_s / 3600),
            "good_per_replica_hour": _rounded(num_kept / self.replica_s * 3600),
            "cost_per_million_tokens": (
                None if cost is None or not num_tokens else _rounded(1e6 * cost * self.span_s / num_tokens)
            ),
            "moved": sum(it.num_moves for it in self.records),
            "retried": sum(max(0, it.num_attempts - 1) for it in self.records),
            "attempts": dict(Counter(it.num_attempts for it in good)),
        }


def result_of(
    cluster: SimulatedCluster,
    began_at: float,
    objectives: SimulatedObjectives,
    price_per_s: float | None = None,
) -> SimulationResult:
    """Return the result of a cluster whose requests have ended, the first of which came not before
    `began_at`."""
    ends = [record.ended_at for record in cluster.records if record.ended_at is not None]
    uses = []
    for replica in cluster.replicas:
        stats = replica.steps.stats
        num_found = sum(stats.num_hit_tokens.values())
        uses.append(
            ReplicaUse(
                replica.identity.replica_id,
                replica.role,
                replica.ranks.busy_s,
                stats.num_queried_tokens - num_found,
                num_found,
                replica.steps.num_steps,
                dict(stats.num_hit_tokens),
            )
        )
    span_s = max(max(ends, default=began_at) - began_at, 1e-9)
    replica_s = max(cluster.replica_s(began_at, began_at + span_s), 1e-9)
    busy_s = sum(it.busy_s for it in uses) + sum(life.replica.ranks.busy_s for life in cluster.past)
    num_written = 0 if cluster.stores is None else cluster.stores.num_written_bytes
    return SimulationResult(
        cluster.records, uses, span_s, objectives, price_per_s, replica_s, busy_s, num_written
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return _rounded(np.quantile(values, share)) if values else 0.0


def _rounded(value: Any) -> float:
    return round(float(value), 6)
