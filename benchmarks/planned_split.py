"""The division of replicas between prefill and decode that `tandem plan` chooses, beside the best of all
divisions in the simulator, as JSON lines, in virtual time.

For each model, device and load the plan's replicas are divided in every way, and each division is simulated
at the planned rate (`cluster.simulation.plan_check`). The best ones have the most requests that keep both
objectives, or within `TIE` as many: since engines keep the objective for output tokens, decode replicas
compute prompts, and many divisions are equally good. The plan shall have at most one prefill replica more or
less than the nearest of these.

    python -m benchmarks.planned_split [--cases NAME,...] [--seeds N]
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any, NamedTuple

from cluster.planning.device_profile import device_profile
from cluster.planning.device_split import DeviceSplit
from cluster.planning.plan import ModelOnDevices, Plan, PlannedPool
from cluster.planning.planned_model import planned_model
from cluster.planning.replica_rate import PlannedLoad
from cluster.simulation.plan_check import check_plan

LIMIT = 1
# Shares of good requests that are taken to be equal: a few requests of those that a run counts.
TIE = 0.01


class DividedLoad(NamedTuple):
    """A model on replicas of `tp` devices, and a load that needs at most eight of them, so that all are
    simulated."""

    name: str
    model: str
    device: str
    tp: int
    load: PlannedLoad
    rate: float


CASES = (
    DividedLoad("chat", "qwen3-8b", "L40S", 1, PlannedLoad(1024, 128, 1.0, 0.05), 50.0),
    DividedLoad("summaries", "llama-3.1-8b", "H100", 1, PlannedLoad(6000, 150, 2.0, 0.03), 32.0),
    DividedLoad("answers", "qwen3-8b", "L40S", 1, PlannedLoad(500, 400, 1.0, 0.05), 22.0),
    DividedLoad("large", "llama-3.3-70b", "H200", 4, PlannedLoad(3000, 300, 2.0, 0.04), 16.0),
)


class Simulated(NamedTuple):
    """A division in the mean of the seeds: the share of good requests, and the time to first token of nine
    of ten."""

    num_prefill: int
    kept: float
    ttft_s: float


def divided(case: DividedLoad) -> Plan:
    """Return the plan with a pool for each role, of as many replicas as hold the rate."""
    kind = ModelOnDevices(planned_model(case.model, "auto", "auto"), device_profile(case.device))
    finder, pools = kind.finder(case.load), []
    for role in ("prefill", "decode"):
        capacity = finder.find(DeviceSplit(case.tp), role)
        assert capacity is not None, f"{case.name}: not even one request at a time meets the objectives"
        pools.append(PlannedPool(capacity, math.ceil(case.rate / capacity.rate), kind.profile))
    return Plan(kind.model, case.load, tuple(pools))


def simulated(plan: Plan, num_prefill: int, rate: float, num_seeds: int) -> Simulated:
    """Simulate the replicas of the plan, of which so many compute prompts."""
    counts = num_prefill, sum(pool.num_replicas for pool in plan.pools) - num_prefill
    pools = [pool._replace(num_replicas=count) for pool, count in zip(plan.pools, counts, strict=True)]
    checks = [check_plan(plan._replace(pools=tuple(pools)), rate, seed) for seed in range(1, num_seeds + 1)]
    kept, ttft_s = (
        sum(each) / num_seeds for each in zip(*((it.kept, it.ttft_s) for it in checks), strict=True)
    )
    show(division=f"{counts[0]}+{counts[1]}", kept=round(kept, 4), ttft_s=round(ttft_s, 4))
    return Simulated(num_prefill, kept, ttft_s)


def best_of(divisions: list[Simulated], num_planned: int) -> Simulated:
    """Return the division with the most good requests, or as good as that and nearest to the plan."""
    most = max(it.kept for it in divisions)
    return min(
        (it for it in divisions if it.kept >= most - TIE), key=lambda it: abs(it.num_prefill - num_planned)
    )


def judge(case: DividedLoad, num_seeds: int) -> bool:
    """Compare the plan with all divisions; return whether it keeps the limit."""
    plan = divided(case)
    num_all, num_planned = sum(it.num_replicas for it in plan.pools), plan.pools[0].num_replicas
    rates = {it.capacity.role: round(it.capacity.rate, 2) for it in plan.pools}
    show(case=case.name, rate=case.rate, rates_of_replicas=rates, planned=num_planned, replicas=num_all)
    divisions = [simulated(plan, count, case.rate, num_seeds) for count in range(1, num_all)]
    best = best_of(divisions, num_planned)
    off = abs(best.num_prefill - num_planned)
    show(
        figure=f"prefill replicas off the nearest of the simulator's best, {case.name}",
        planned=num_planned,
        best=best.num_prefill,
        replicas=num_all,
        value=off,
        limit=LIMIT,
        ratio=round(off / LIMIT, 2),
    )
    return off <= LIMIT


def show(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    names = arguments.cases.split(",")
    judged = [judge(case, arguments.seeds) for case in CASES if case.name in names]
    raise SystemExit(not all(judged))


if __name__ == "__main__":
    main()
