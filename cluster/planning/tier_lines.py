"""The lines of a plan about the store's tiers."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.planning.plan import Plan
from cluster.planning.plan_line import PlanLine, gb, ms, span
from cluster.planning.store_tiers import BLOCK_TOKENS, PlannedTier, TierPlan

_SHOWN_NAMES = {"device": "device", "dram": "DRAM", "nvme": "NVMe"}


def tier_lines(plan: Plan, tiers: TierPlan, rate: float) -> Iterator[PlanLine]:
    """Yield a line a tier, and what all of them save."""
    for tier in tiers.tiers:
        yield PlanLine("store", _SHOWN_NAMES[tier.name], _size(tier, tiers), _formula(tier, tiers))
    reuse, load = tiers.reuse, plan.load
    saved = rate * tiers.hit_rate * load.input_tokens
    price = "" if tiers.token_price is None else f", {3600 * saved * tiers.token_price:.2f} an hour"
    yield PlanLine(
        "store",
        "found again",
        f"{tiers.hit_rate:.0%} of the prompts' tokens, of {reuse.hit_rate:.0%} that come back",
        f"{saved:,.0f} tokens a second are not computed{price}",
    )


def _size(tier: PlannedTier, tiers: TierPlan) -> str:
    if not tier.num_bytes:
        return "does not pay"
    where = "in all" if tier.name == "device" else "a node"
    size = tier.num_bytes if tier.name == "device" else tier.num_bytes / tiers.num_nodes
    return f"{gb(size)} {where}, keeps {span(tier.kept_s)}, finds {tier.hit_rate:.0%}"


def _formula(tier: PlannedTier, tiers: TierPlan) -> str:
    if tier.name == "device":
        return f"{tier.why}; found: h (1 - e^(-T / {tiers.reuse.gap_s:g} s)), h = {tiers.reuse.hit_rate:g}"
    times = f"{ms(tier.block_load_s)} to load, {ms(tiers.block_s)} to compute"
    return f"a block of {BLOCK_TOKENS} tokens: {times}; {tier.why}"
