"""Goodput of a cluster that is offered more than it can do, in virtual time, as JSON lines.

A simulated cluster of one gateway (`cluster.simulation`) runs the code that serves. The capacity is measured
with as many requests in the cluster as it takes; then requests arrive at random (Poisson) at 0.5 to 5 times
as many a second, for three minutes each, and at half of it after the last. A request is good when its first
token comes within the objective of its class and an output token takes `TPOT_S` on average.

    python -m benchmarks.overload [--replicas 100] [--scenarios mixed,decode_bound] [--duration 180]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cluster.admission.config import AdmissionConfig
from cluster.bench.overload_curve import recovered_after_s
from cluster.simulation.simulated_call import CallRecord, SimulatedRequest
from cluster.simulation.simulated_cluster import ClusterShape, SimulatedCluster
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.step_model import StepModel
from kvtransfer.request_facts import ServiceClass

MULTIPLES = (0.5, 0.9, 1.2, 2.0, 5.0)
TPOT_S = 0.4
RECOVERY_S = 30.0
# The span is long enough for this number of requests, where they are few.
RECOVERY_REQUESTS = 100
# The first seconds of a load do not count where steady figures are meant.
WARM_UP_S = 20.0
# Until then the gateway knows all replicas, and nothing arrives.
BEGINS_S = 1.0
# Accepted requests have this long to end.
END_S = 120.0


class Tenant(NamedTuple):
    """A sender of requests of one class, and its part of all requests."""

    name: str
    service_class: ServiceClass
    part: float = 1.0


class Lengths(NamedTuple):
    """Tokens of prompts and outputs: log-normal, with these medians and spreads, within bounds."""

    prompt: float = 600.0
    output: float = 100.0
    spread: float = 0.8
    most_prompt: int = 6000
    most_output: int = 800

    def draw(self, source: np.random.Generator) -> tuple[int, int]:
        """Return the tokens of a prompt and of its output."""
        num_prompt = int(self.prompt * source.lognormal(0.0, self.spread))
        num_output = int(self.output * source.lognormal(0.0, self.spread))
        return min(max(num_prompt, 16), self.most_prompt), min(max(num_output, 2), self.most_output)


# About 1.7 requests of the usual lengths a second. A step of 256 tokens of prompts takes 94 ms.
ENGINE = SimulatedEngine(
    StepModel(base_s=0.03, sequence_s=0.001, context_s=1e-6, token_s=3.67e-4, link_bytes_s=6.5e9),
    num_blocks=8000,
    block_tokens=16,
    max_batch_tokens=256,
    chunk_tokens=256,
    max_sequences=32,
)
MIXED = [Tenant("a", "interactive", 6.0), Tenant("a", "standard", 3.0), Tenant("a", "batch", 1.0)]
INTERACTIVE = [Tenant("a", "interactive")]


class Scenario(NamedTuple):
    """The load that is offered to the replicas. `roles` repeat until there are enough."""

    roles: tuple[str, ...]
    tenants: list[Tenant]
    lengths: Lengths = Lengths()
    engine: SimulatedEngine = ENGINE


FEW_PLACES = ENGINE._replace(max_sequences=8)
SCENARIOS = {
    "mixed": Scenario(("both",), MIXED),
    "interactive": Scenario(("both",), INTERACTIVE),
    "pools": Scenario(("prefill", "decode"), MIXED),
    "decode_bound": Scenario(("both",), MIXED, Lengths(100.0, 300.0), FEW_PLACES),
    "prefill_bound": Scenario(("both",), MIXED, Lengths(2000.0, 10.0)),
    "decode_bound_pools": Scenario(("prefill", "decode"), MIXED, Lengths(100.0, 300.0), FEW_PLACES),
}


class OfferedCluster:
    """A scenario's cluster with the default settings of admission, and what is offered to it."""

    def __init__(
        self, scenario: Scenario, num_replicas: int, seed: int, *, has_admission: bool = True
    ) -> None:
        """Without `has_admission`, whatever comes is routed at once."""
        self.config = AdmissionConfig()
        roles = itertools.islice(itertools.cycle(scenario.roles), num_replicas)
        replicas = [(role, scenario.engine) for role in roles]
        self.cluster = SimulatedCluster(
            ClusterShape(replicas, admission=self.config, holds_back=has_admission), seed
        )
        self.events = self.cluster.events
        self.events.run(BEGINS_S)
        self._scenario = scenario
        self._source = np.random.default_rng(seed)
        self._parts = np.array([tenant.part for tenant in scenario.tenants])
        self._parts /= self._parts.sum()

    @property
    def requests(self) -> list[CallRecord]:
        """All that have arrived."""
        return self.cluster.records

    @property
    def num_ended(self) -> int:
        """The requests that have ended."""
        return len(self.cluster.records) - self.cluster.num_running

    @property
    def highest_rung(self) -> int:
        """The highest rung of degradation on which the gateway stood; 0: nothing was degraded."""
        return max((int(rung) for it in self.cluster.gateways for _, rung in it.rungs), default=0)

    def run(self, duration_s: float) -> None:
        """Let so much time pass."""
        self.events.run(self.cluster.clock.now() + duration_s)

    def offer(self, rate_s: float, duration_s: float) -> None:
        """Let requests arrive at random (Poisson) for so long from now, `rate_s` a second."""
        until_s = self.cluster.clock.now() + duration_s

        def arrive() -> None:
            if self.cluster.clock.now() < until_s:
                self.cluster.arrive(self._draw())
                self.events.after(self._source.exponential(1 / rate_s), arrive)

        self.events.after(self._source.exponential(1 / rate_s), arrive)

    def saturate(self, num_requests: int) -> None:
        """Keep `num_requests` requests in the cluster: one comes for each that ends."""

        def arrive(ended: CallRecord | None = None) -> None:
            self.cluster.arrive(self._draw(), arrive)

        for _ in range(num_requests):
            arrive()

    def check(self) -> None:
        """Assert the invariants of the gateway."""
        for gateway in self.cluster.gateways:
            gateway.router.check()
            gateway.admission.check()

    def _draw(self) -> SimulatedRequest:
        source, scenario = self._source, self._scenario
        tenant = scenario.tenants[int(source.choice(len(self._parts), p=self._parts))]
        num_prompt, num_output = scenario.lengths.draw(source)
        prompt = source.integers(0, 1 << 30, num_prompt, dtype=np.uint32).astype("<u4").tobytes()
        return SimulatedRequest(prompt, num_output, tenant.name, tenant.service_class)


def measured_capacity(
    scenario: Scenario, num_replicas: int, seed: int = 1, duration_s: float = 120.0
) -> float:
    """Return the requests a second that the replicas get done when they always have enough."""
    offered = OfferedCluster(scenario, num_replicas, seed, has_admission=False)
    offered.saturate(int(1.5 * num_replicas * scenario.engine.max_sequences))
    offered.run(60.0)
    before = offered.num_ended
    offered.run(duration_s)
    return (offered.num_ended - before) / duration_s


def is_good(request: CallRecord, config: AdmissionConfig) -> bool:
    """Whether the request kept the objectives of its class; a batch request only has to come so far."""
    objective_s = config.of(request.service_class).ttft_s
    if objective_s is None:
        return request.first_token_at is not None
    return request.ttft_s <= objective_s and request.tpot_s <= TPOT_S


class Load(NamedTuple):
    """One load and what became of it."""

    offered: OfferedCluster
    offered_per_s: float
    duration_s: float

    def sent(self, since_s: float, until_s: float) -> list[CallRecord]:
        """Return the requests that arrived then, in seconds from the load's beginning."""
        return [it for it in self.offered.requests if since_s <= it.arrived_at - BEGINS_S < until_s]

    def record(self) -> dict[str, Any]:
        """Return the figures of the requests that arrived during the load."""
        cluster, config = self.offered.cluster, self.offered.config
        sent = self.sent(0.0, self.duration_s)
        taken = [it for it in sent if not it.refusal]
        refused = [it for it in sent if it.refusal]
        good = [it for it in sent if is_good(it, config)]
        late = [it for it in taken if not is_good(it, config)]
        steady = [it for it in self.sent(WARM_UP_S, self.duration_s) if is_good(it, config)]
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
            "by_class": dict(Counter(it.service_class for it in good)),
            "ttft_s": _quantiles([it.ttft_s for it in taken if it.first_token_at is not None]),
            "tpot_s": _quantiles([it.tpot_s for it in taken if it.ended_at is not None]),
            "num_preemptions": sum(it.reports.load().num_preemptions for it in cluster.replicas),
            "rung": self.offered.highest_rung,
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
    offered = OfferedCluster(scenario, num_replicas, seed)
    offered.offer(rate_s, duration_s)
    offered.run(duration_s)
    if after_s:
        offered.offer(after_rate_s, after_s)
        offered.run(after_s)
    offered.run(END_S)
    offered.check()
    return Load(offered, rate_s, duration_s)


def recovered_s(load: Load, after_s: float) -> float | None:
    """Return after how many seconds goodput is back, as `tandem bench serve --overload` has it; None: not at
    all. The class batch has no objective: it is admitted when the others are well."""
    end_s = load.duration_s
    sent = [it for it in load.sent(end_s, end_s + after_s) if it.service_class != "batch"]
    return recovered_after_s(
        [it.arrived_at - BEGINS_S - end_s for it in sent],
        [is_good(it, load.offered.config) for it in sent],
    )


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


def work_s(steps: StepModel, max_sequences: int, request: CallRecord) -> float:
    """Return what a request takes of a replica on which all sequences run."""
    each_s = steps.base_s / max_sequences + steps.sequence_s + request.num_prompt * steps.context_s
    return request.num_prompt * steps.token_s + request.num_output * each_s


def greedy(num_replicas: int, duration_s: float, load: float = 0.6) -> dict[str, Any]:
    """Run four tenants of one weight: one offers ten times its share of the capacity, each of the others
    `load` of its share."""
    scenario = SCENARIOS["interactive"]
    share = measured_capacity(scenario, num_replicas) / 4
    parts = {"greedy": 10.0, "b": load, "c": load, "d": load}
    tenants = [Tenant(name, "interactive", part) for name, part in parts.items()]
    rate_s = share * sum(parts.values())
    done = run_load(scenario._replace(tenants=tenants), num_replicas, rate_s, duration_s)
    sent = done.sent(WARM_UP_S, duration_s)
    tenant_to_work_s = dict.fromkeys(parts, 0.0)
    num_served: Counter[str] = Counter()
    for request in sent:
        if request.first_token_at is not None and request.first_token_at - BEGINS_S < duration_s:
            num_served[request.tenant] += 1
            tenant_to_work_s[request.tenant] += work_s(
                scenario.engine.steps, scenario.engine.max_sequences, request
            )
    good = Counter(it.tenant for it in sent if is_good(it, done.offered.config))
    num_sent = Counter(it.tenant for it in sent)
    return {
        "what": "greedy",
        "replicas": num_replicas,
        "served_share_of_greedy": round(tenant_to_work_s["greedy"] / sum(tenant_to_work_s.values()), 3),
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
    # Nothing of a request is in a cycle, and looking for cycles among all blocks takes long.
    gc.disable()
    for num_replicas in map(int, arguments.replicas.split(",")):
        for name in arguments.scenarios.split(","):
            for line in overload(name, SCENARIOS[name], num_replicas, arguments.duration):
                print(json.dumps(line), flush=True)
        print(json.dumps(greedy(num_replicas, arguments.duration)), flush=True)


if __name__ == "__main__":
    main()
