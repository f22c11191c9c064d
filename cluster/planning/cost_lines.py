"""The lines of a plan about the whole cluster: devices, whether to disaggregate, and cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.planning.plan import Plan
from cluster.planning.plan_line import PlanLine


def cluster_lines(plan: Plan, rate: float, others: Sequence[Plan]) -> Iterator[PlanLine]:
    """Yield the lines about all pools together."""
    yield PlanLine(
        "cluster",
        "devices",
        plan.devices,
        " + ".join(f"{it.num_replicas} x {it.capacity.split.num_devices}" for it in plan.pools),
    )
    yield PlanLine(
        "cluster",
        "requests a second",
        f"{plan.rate:.2f} within the objectives",
        f"the least of its pools; asked: {rate:.2f}, which is {rate / plan.rate:.0%} of it",
    )
    yield PlanLine(
        "cluster",
        "disaggregate",
        "yes, into two pools" if plan.is_disaggregated else "no: one pool of both roles",
        _beside(plan, others),
    )
    if len(plan.pools) > 1:
        prefill, decode = plan.pools
        yield PlanLine(
            "cluster",
            "prefill to decode",
            f"{prefill.num_devices} : {decode.num_devices} devices",
            f"{rate:.2f} / {prefill.capacity.rate:.2f} and {rate:.2f} / {decode.capacity.rate:.2f} replicas, "
            "rounded up",
        )


def _beside(plan: Plan, others: Sequence[Plan]) -> str:
    """Compare the plan with the best one that has the other division."""
    other = next((it for it in others if it.is_disaggregated != plan.is_disaggregated), None)
    if other is None:
        return "the other division does not meet the objectives with these devices"

    def said(its: Plan) -> str:
        pools = "two pools" if its.is_disaggregated else "one pool"
        price = "" if its.price_per_hour is None else f" at {its.price_per_hour:.2f} an hour"
        return f"{pools}: {its.devices}{price}, {its.rate:.2f} requests/s"

    return f"{said(plan)}; {said(other)}"


def cost_lines(plan: Plan, rate: float, api_price: float | None, utilization: float) -> Iterator[PlanLine]:
    """Yield the lines about the cost of a million tokens, if prices are known."""
    mean_rate = utilization * rate
    cost = plan.cost_per_million(mean_rate)
    if cost is None:
        return
    tokens = plan.load.input_tokens + plan.load.output_tokens
    share = "" if utilization == 1 else f"{utilization:g} x "
    yield PlanLine(
        "cost",
        "a million tokens",
        f"{cost:.3f}",
        f"{plan.price_per_hour:.2f} an hour / (3600 x {share}{rate:.2f} x {tokens} tokens), both ways",
    )
    if api_price is None:
        return
    least = plan.cost_per_million(plan.rate)
    assert least is not None
    assert plan.price_per_hour is not None
    even = least / api_price
    value = f"{even:.0%} of what the plan holds" if even <= 1 else "never: the API is cheaper"
    yield PlanLine(
        "cost",
        f"as cheap as {api_price:g} a million",
        value,
        f"{least:.3f} a million at {plan.rate:.2f} requests/s / {api_price:g}",
    )
    yield PlanLine(
        "cost",
        "break-even",
        f"{24 * plan.price_per_hour / api_price:,.0f} million tokens a day",
        f"24 x {plan.price_per_hour:.2f} / {api_price:g}; the plan has "
        f"{86400 * mean_rate * tokens / 1e6:,.0f} at {utilization:.0%} utilization, "
        f"{cost / api_price:.2f} of the API's price",
    )
