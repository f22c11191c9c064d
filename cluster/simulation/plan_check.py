"""Check a plan by a simulation: whether nine of ten requests keep the objectives for which it was made.

A plan computes with means and the tails of queues in theory. The simulation has requests of lengths as unlike
as the plan takes them to be, that arrive at random, before the router and schedulers that serve.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cluster.planning.plan import Plan
from cluster.planning.replica_rate import MAX_SEQUENCES, MISSES
from cluster.simulation.planned_engine import planned_engine
from cluster.simulation.run_simulation import SimulationPlan, run_simulation
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import DrawnLengths, drawn_sessions
from cluster.simulation.simulation_result import SimulatedObjectives

# The sigma of a lognormal distribution whose deviation is its mean, as that of an exponential one.
_SIGMA = math.sqrt(math.log(2))
# More replicas are simulated in proportion: as many of each role, at as much of the rate.
_MOST_REPLICAS = 8
_LEAST_REQUESTS, _MANY_REQUESTS, _SPAN_S = 200, 600, 60.0
# Requests arrive for at least so many times as long as one takes, as far as these are not too many.
_LIFETIMES, _MOST_REQUESTS = 4, 2000
# The first part of the requests finds an empty cluster, and does not count.
_WARM_UP_PART = 0.25


class PlanCheck(NamedTuple):
    """What a simulation saw: the times of nine of ten requests, in seconds, and the share of requests that
    kept both objectives, of `num_requests` at `num_replicas`."""

    ttft_s: float
    tpot_s: float
    kept: float
    num_requests: int
    num_replicas: int

    @property
    def is_kept(self) -> bool:
        """Whether nine of ten requests kept both objectives."""
        return self.kept >= 1 - MISSES


def check_plan(plan: Plan, rate: float, seed: int = 1) -> PlanCheck:
    """Simulate the plan at this rate of requests."""
    num_all = sum(pool.num_replicas for pool in plan.pools)
    share = min(1.0, _MOST_REPLICAS / num_all)
    counts = [max(1, round(share * pool.num_replicas)) for pool in plan.pools]
    # Rounding changes the proportion of roles: the rate follows the pool that has lost most.
    share = min(count / pool.num_replicas for count, pool in zip(counts, plan.pools, strict=True))
    replicas = [
        (
            pool.capacity.role,
            planned_engine(
                plan.model,
                pool.profile,
                pool.capacity.split,
                MAX_SEQUENCES,
                tpot_objective_s=plan.load.tpot_s,
            ),
        )
        for count, pool in zip(counts, plan.pools, strict=True)
        for _ in range(count)
    ]
    load = plan.load
    num_requests = _num_requests(share * rate, load.ttft_s + load.output_tokens * load.tpot_s)
    lengths = DrawnLengths(load.input_tokens, load.output_tokens, _SIGMA)
    shared = int(load.hit_rate * load.input_tokens)
    objectives = SimulatedObjectives(load.ttft_s, load.tpot_s)
    sessions = drawn_sessions(lengths, share * rate, num_requests, seed, shared_tokens=shared)
    shape = ClusterShape(replicas, holds_back=False)
    records = run_simulation(SimulationPlan(shape, sessions, objectives, seed)).result.records
    counted = records[int(_WARM_UP_PART * len(records)) :]
    return PlanCheck(
        float(np.quantile([it.ttft_s for it in counted], 1 - MISSES)),
        float(np.quantile([it.tpot_s for it in counted], 1 - MISSES)),
        sum(map(objectives.kept_by, counted)) / len(counted),
        len(counted),
        len(replicas),
    )


def _num_requests(rate: float, lifetime_s: float) -> int:
    """Return how many requests arrive: within a minute, but no fewer than tell shares from one another, no
    more than do, and until decode replicas have as many streams as they will have."""
    usual = min(max(_LEAST_REQUESTS, round(rate * _SPAN_S)), _MANY_REQUESTS)
    return max(usual, min(_MOST_REQUESTS, round(_LIFETIMES * rate * lifetime_s)))


def checked_plans(plans: list[Plan], rate: float | None) -> list[tuple[Plan, PlanCheck | None]]:
    """Check each plan that the engine starts, at the rate (None: at what it holds), and return those first
    that keep the objectives; otherwise the order stays."""
    checked = [
        (plan, None if plan.refusal else check_plan(plan, rate if rate is not None else plan.rate))
        for plan in plans
    ]
    return sorted(checked, key=lambda it: it[1] is not None and not it[1].is_kept)
