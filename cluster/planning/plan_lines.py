"""Say what a plan rests on, a line a figure, each with its formula and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.planning.cost_lines import cluster_lines, cost_lines
from cluster.planning.model_lines import device_lines, model_lines
from cluster.planning.plan import Plan
from cluster.planning.plan_line import PlanLine
from cluster.planning.pool_lines import pool_lines
from cluster.planning.tier_lines import tier_lines


def plan_lines(
    plan: Plan,
    rate: float,
    api_price: float | None = None,
    *,
    utilization: float = 1.0,
    others: Sequence[Plan] = (),
) -> Iterator[PlanLine]:
    """Yield the lines of a plan at a rate of requests.

    `api_price` is that of a million tokens elsewhere, `utilization` the mean rate as a share of this one, and
    `others` are plans beside it, which answer whether to disaggregate.
    """
    yield from model_lines(plan)
    yield from device_lines(plan)
    for pool in plan.pools:
        yield from pool_lines(plan, pool)
    if plan.tiers is not None:
        yield from tier_lines(plan, plan.tiers, rate)
    yield from cluster_lines(plan, rate, others)
    yield from cost_lines(plan, rate, api_price, utilization)
