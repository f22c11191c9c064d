"""Goodput of a cluster that is offered more than it can do, in virtual time, as JSON lines.

The real router and the real admission run before simulated engines (`benchmarks.virtual_cluster`). The
capacity is measured with as many requests in the cluster as it takes; then requests arrive at random
(Poisson) at 0.5 to 5 times as many a second, for three minutes each, and at half of it after the last. A
request is good when its first token comes within the objective of its class and an output token takes
`TPOT_S` on average.

    python -m benchmarks.overload [--replicas 100] [--scenarios mixed,decode_bound] [--duration 180]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.virtual_cluster import Lengths, Tenant, VirtualCluster
from benchmarks.virtual_replica import EngineModel, VirtualRequest
from cluster.admission.config import AdmissionConfig
from cluster.bench.overload_curve import recovered_after_s

MULTIPLES = (0.5, 0.9, 1.2, 2.0, 5.0)
TPOT_S = 0.4
RECOVERY_S = 30.0
# The span is long enough for this number of requests, where they are few.
RECOVERY_REQUESTS = 100
# The first seconds of a load do not count where steady figures are meant.
WARM_UP_S = 20.0

MIXED = [Tenant("a", "interactive", 6.0), Tenant("a", "standard", 3.0), Tenant("a", "batch", 1.0)]
INTERACTIVE = [Tenant("a", "interactive")]


class Scenario(NamedTuple):
    """The load that is offered to the replicas. `roles` repeat until there are enough."""

    roles: tuple[str, ...]
    tenants: list[Tenant]
    lengths: Lengths = Lengths()
    model: EngineModel = EngineModel()


SCENARIOS = {
    "mixed": Scenario(("both",), MIXED),
    "interactive": Scenario(("both",), INTERACTIVE),
    "pools": Scenario(("prefill", "decode"), MIXED),
    "decode_bound": Scenario(("both",), MIXED, Lengths(100.0, 300.0), EngineModel(max_sequences=8)),
    "prefill_bound": Scenario(("both",), MIXED, Lengths(2000.0, 10.0)),
    "decode_bound_pools": Scenario(
        ("prefill", "decode"), MIXED, Lengths(100.0, 300.0), EngineModel(max_sequences=8)
    ),
}


def make_cluster(
    scenario: Scenario, num_replicas: int, seed: int, *, has_admission: bool = True
) -> VirtualCluster:
    """Make the scenario's cluster with the default settings of admission."""
    roles = itertools.islice(itertools.cycle(scenario.roles), num_replicas)
    return VirtualCluster(
        [(role, scenario.model) for role in roles], AdmissionConfig(), seed, has_admission=has_admission
    )


def measured_capacity(
    scenario: Scenario, num_replicas: int, seed: int = 1, duration_s: float = 120.0
) -> float:
    """Return the requests a second that the replicas get done when they always have enough."""
    cluster = make_cluster(scenario, num_replicas, seed, has_admission=False)
    cluster.saturate(
        int(1.5 * num_replicas * scenario.model.max_sequences), scenario.tenants, scenario.lengths
    )
    cluster.events.run(60.0)
    before = sum(it.ended_at is not None for it in cluster.requests)
    cluster.events.run(60.0 + duration_s)
    return (sum(it.ended_at is not None for it in cluster.requests) - before) / duration_s


def is_good(request: VirtualRequest, config: AdmissionConfig) -> bool:
    """Whether the request kept the objectives of its class; a batch request only has to end."""
    objective_s = config.of(request.flow.service_class).ttft_s
    if objective_s is None:
        return request.first_token_at is not None
    return request.ttft_s <= objective_s and request.tpot_s <= TPOT_S


class Load(NamedTuple):
    """One load and what became of it."""

    cluster: VirtualCluster
    offered_per_s: float
    duration_s: float

    def record(self) -> dict[str, Any]:
        """Return the figures of the requests that arrived during the load."""
        config = self.cluster.config
        sent = [it for it in self.cluster.requests if it.arrived_at < self.duration_s]
        taken = [it for it in sent if not it.refusal]
        refused = [it for it in sent if it.refusal]
        good = [it for it in sent if is_good(it, config)]
        late = [it for it in taken if not is_good(it, config)]
        steady = [it for it in good if it.arrived_at >= WARM_UP_S]
        return {
            "offered_per_s": round(self.offered_per_s, 2),
            "goodput_per_s": round(len(steady) / (self.duration_s - WARM_UP_S), 3),
            "num_sent": len(sent),
            "num_good": len(good),
            "num_refused": sum(it.ended_at == it.arrived_at for it in refused),
            "num_expired": sum(it.ended_at != it.arrived_at for it in refused),
            "num_late_first_token": sum(it.tpot_s <= TPOT_S for it in late),
            "num_slow_tokens": sum(it.tpot_s > TPOT_S for it in late),
            "num_unended": sum(it.ended_at is None for it in taken),
            "by_class": dict(Counter(it.flow.service_class for it in good)),
            "ttft_s": _quantiles([it.ttft_s for it in taken if it.first_token_at is not None]),
            "held_s": _quantiles(
                [it.released_at - it.arrived_at for it in taken if it.released_at is not None]
            ),
            "tpot_s": _quantiles([it.tpot_s for it in taken if it.ended_at is not None]),
            "num_preemptions": sum(it.num_preemptions for it in self.cluster.replicas.values()),
            "rung": max((int(rung) for _, rung in self.cluster.rungs), default=0),
        }


def run_load(
    scenario: Scenario,
    num_replicas: int,
    rate_s: float,
    duration_s: float,
    *,
    seed: int = 1,
    after_s: float = 0.0,
    after_rate_s: float = 0.0,
) -> Load:
    """Offer one load, then another for `after_s`, and wait for the accepted requests to end."""
    cluster = make_cluster(scenario, num_replicas, seed)
    cluster.offer(rate_s, duration_s, scenario.tenants, scenario.lengths)
    cluster.events.run(duration_s)
    if after_s:
        cluster.offer(after_rate_s, duration_s + after_s, scenario.tenants, scenario.lengths)
    cluster.events.run(duration_s + after_s + 120.0)
    cluster.router.check()
    cluster.admission.check()
    return Load(cluster, rate_s, duration_s)


def recovered_s(load: Load, after_s: float) -> float | None:
    """Return after how many seconds goodput is back, as `tandem bench serve --overload` has it; None: not at
    all. The class batch has no objective: it is admitted when the others are well."""
    config, end_s = load.cluster.config, load.duration_s
    sent = [
        it
        for it in load.cluster.requests
        if end_s <= it.arrived_at < end_s + after_s and it.flow.service_class != "batch"
    ]
    return recovered_after_s([it.arrived_at - end_s for it in sent], [is_good(it, config) for it in sent])


def overload(name: str, scenario: Scenario, num_replicas: int, duration_s: float) -> Iterator[dict[str, Any]]:
    """Measure the capacity, every load, and the recovery after the last."""
    capacity = measured_capacity(scenario, num_replicas, duration_s=min(120.0, duration_s))
    peak = 0.0
    for multiple in MULTIPLES:
        started_at = time.perf_counter()
        after_rate_s = MULTIPLES[0] * capacity
        after_s = max(RECOVERY_S, RECOVERY_REQUESTS / after_rate_s) if multiple == MULTIPLES[-1] else 0.0
        load = run_load(
            scenario,
            num_replicas,
            multiple * capacity,
            duration_s,
            after_s=after_s,
            after_rate_s=after_rate_s,
        )
        record = load.record()
        peak = max(peak, record["goodput_per_s"])
        line = {
            "what": "overload",
            "scenario": name,
            "replicas": num_replicas,
            "multiple": multiple,
            "capacity_per_s": round(capacity, 2),
            "goodput_to_capacity": round(record["goodput_per_s"] / capacity, 3),
            "goodput_to_peak": round(record["goodput_per_s"] / peak, 3),
            **record,
        }
        if after_s:
            line["recovered_s"] = recovered_s(load, after_s)
        line["took_s"] = round(time.perf_counter() - started_at, 1)
        yield line


def greedy(num_replicas: int, duration_s: float, load: float = 0.6) -> dict[str, Any]:
    """Run four tenants of one weight: one offers ten times its share of the capacity, each of the others
    `load` of its share."""
    scenario = SCENARIOS["interactive"]
    share = measured_capacity(scenario, num_replicas) / 4
    parts = {"greedy": 10.0, "b": load, "c": load, "d": load}
    tenants = [Tenant(name, "interactive", part) for name, part in parts.items()]
    rate_s = share * sum(parts.values())
    done = run_load(scenario._replace(tenants=tenants), num_replicas, rate_s, duration_s)
    config = done.cluster.config
    sent = [it for it in done.cluster.requests if it.arrived_at >= WARM_UP_S]
    work_s = dict.fromkeys(parts, 0.0)
    num_served: Counter[str] = Counter()
    for request in sent:
        if request.first_token_at is not None and request.first_token_at < duration_s:
            num_served[request.flow.tenant] += 1
            work_s[request.flow.tenant] += scenario.model.work_s(request.num_prompt, request.num_output)
    good = Counter(it.flow.tenant for it in sent if is_good(it, config))
    num_sent = Counter(it.flow.tenant for it in sent)
    return {
        "what": "greedy",
        "replicas": num_replicas,
        "served_share_of_greedy": round(work_s["greedy"] / sum(work_s.values()), 3),
        # The share that the others leave.
        "share_left": round(1 - 0.75 * load, 3),
        "served_per_s": round(num_served.total() / (duration_s - WARM_UP_S), 2),
        "capacity_per_s": round(4 * share, 2),
        "good_part": {name: round(good[name] / max(1, num_sent[name]), 3) for name in parts},
    }


def _quantiles(values: list[float]) -> list[float]:
    """Return the median, the 99th percentile and the greatest."""
    if len(values) < 2:
        return values
    percentiles = statistics.quantiles(values, n=100)
    return [round(it, 3) for it in (percentiles[49], percentiles[98], max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", default="2,100")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--duration", type=float, default=180.0)
    arguments = parser.parse_args()
    for num_replicas in map(int, arguments.replicas.split(",")):
        for name in arguments.scenarios.split(","):
            for line in overload(name, SCENARIOS[name], num_replicas, arguments.duration):
                print(json.dumps(line), flush=True)
        print(json.dumps(greedy(num_replicas, arguments.duration)), flush=True)


if __name__ == "__main__":
    main()
