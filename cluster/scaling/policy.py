"""How many prefill and decode replicas there should be, and which play the other role: a pure function.

`decide` looks at the history, the configuration and the pools, and at nothing else; the scaler actor calls it
live and on simulated clusters. docs/scaling.md explains the reasoning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.forecast_replicas import ReplicaNeed
from cluster.scaling.policy_input import HYSTERESIS, PolicyView, ReplicaKind
from cluster.scaling.role_changes import role_changes
from cluster.scaling.samples import BOTH, DECODE, PREFILL, History, PoolView
from cluster.scaling.scale_to_zero import is_unused, moves_to_zero
from cluster.scaling.scaling_plan import PoolMove, RoleAssignment, RoleReturn, ScalingPlan

__all__ = ["Policy", "PoolMove", "RoleAssignment", "RoleReturn", "ScalingPlan", "decide", "history_span_s"]

# A policy decides what to change: `decide`, or one to compare with it.
Policy = Callable[[History, ScalingConfig, Sequence[PoolView], float], ScalingPlan]
_MIN_STALE_S = 10.0


def history_span_s(config: ScalingConfig) -> float:
    """Return how much history `decide` looks at: the span to make a `History` with."""
    zero_after_s = config.zero_after_s if config.scales_to_zero else 0.0
    longest_s = max(config.forecast_s, config.down_cool_down_s, config.role_change_after_s, zero_after_s)
    return longest_s + 2 * config.interval_s


def decide(history: History, config: ScalingConfig, pools: Sequence[PoolView], now: float) -> ScalingPlan:
    """Decide what to change at Unix time `now`: nothing while the samples are missing or old.

    Moves concern pools with limits that are not pinned, and only with `config.autoscale`; role changes only
    with `config.change_roles`. The caller carries them out, or not: the next call starts from what is.
    """
    latest = history.latest
    if latest is None:
        return ScalingPlan(notes=("nothing was seen yet",))
    age_s = now - latest.at
    if age_s > max(5 * config.interval_s, _MIN_STALE_S):
        return ScalingPlan(notes=(f"nothing is decided: the latest samples are {age_s:.0f} s old",))
    view = PolicyView(history, config, pools, latest, now)
    needs, lasting = view.needs(), view.lasting_needs()
    changes = role_changes(view, needs, lasting)
    if not config.autoscale:
        return ScalingPlan(role_changes=changes)
    moves: list[PoolMove] = list(moves_to_zero(view))
    if moves:
        return ScalingPlan(tuple(moves), changes)
    notes: list[str] = []
    targets = _targets(view, needs, notes)
    for name, kind in view.kinds.items():
        target = targets[name]
        if target.num_replicas > kind.num_desired:
            moves += _growth(view, kind, target, notes)
        else:
            moves += _shrinking(view, kind, lasting[name])
    moved = {move.pool for move in moves}
    for kind in view.kinds.values():
        moves += _into_limits(view, [pool for pool in kind.pools if pool.name not in moved])
    return ScalingPlan(tuple(moves), changes, tuple(notes))


class _Target(NamedTuple):
    """The number of replicas that a kind should have at home, and the reason."""

    num_replicas: int
    reason: str


def _targets(view: PolicyView, needs: Mapping[str, ReplicaNeed], notes: list[str]) -> dict[str, _Target]:
    """Return for each kind the larger of the forecast and of the number that its shortage calls for."""
    targets = {}
    for name, kind in view.kinds.items():
        need, shortage = needs[name], view.shortages.get(name)
        target = _Target(need.num_replicas or 0, f"forecast: {need.reason}")
        if need.num_replicas is None and need.reason:
            notes.append(f"{name}: {need.reason}")
        if (
            shortage is not None
            and (wanted := shortage.num_replicas - kind.num_borrowed) > target.num_replicas
        ):
            target = _Target(wanted, f"now: {shortage.reason}")
        targets[name] = target if kind.num_desired else _first_of(view, target)
    if PREFILL in targets and DECODE in targets and BOTH not in targets:
        targets[PREFILL] = _not_beyond_decode(view, targets[PREFILL], targets[DECODE], notes)
    return targets


def _first_of(view: PolicyView, target: _Target) -> _Target:
    """Return the target of a kind without replicas: none until something is asked for."""
    if is_unused(view, view.config.zero_after_s):
        return _Target(0, "nothing is asked for")
    return target._replace(num_replicas=1, reason="now: requests have come, and there is no replica")


def _not_beyond_decode(view: PolicyView, prefill: _Target, decode: _Target, notes: list[str]) -> _Target:
    """Limit the target of prefill by decode: more prompts than decode replicas can take need no prefill
    replicas, since those prompts would wait there."""
    if (queue := view.blocked_queue()) is not None:
        notes.append(f"prefill does not grow for its queue, which waits for decode: {queue.reason}")
    reach, num_here = view.kinds[DECODE].reach, view.kinds[PREFILL].num_desired
    if prefill.num_replicas <= num_here or decode.num_replicas <= reach:
        return prefill
    useful = max(num_here, math.ceil(reach / decode.num_replicas * prefill.num_replicas))
    if useful < prefill.num_replicas:
        notes.append(
            f"prefill grows to {useful} and not {prefill.num_replicas}: decode may have {reach} of the "
            f"{decode.num_replicas} replicas that it needs"
        )
    return prefill._replace(num_replicas=useful)


# -------------------------------------------------------------------------------------------------- growth


def _growth(view: PolicyView, kind: ReplicaKind, target: _Target, notes: list[str]) -> list[PoolMove]:
    """Return the growth of the pools in their order, each as far as it may grow."""
    missing = target.num_replicas - kind.num_desired
    moves = []
    for pool in kind.pools:
        limits, why_not = _may_grow(view, pool)
        if limits is None:
            notes.append(
                f"{pool.name} stays at {pool.desired}, {why_not}, although {missing} more would help: "
                f"{target.reason}"
            )
            continue
        after = min(limits.max, pool.desired + missing)
        if after > pool.desired:
            moves.append(PoolMove(pool.name, pool.desired, after, target.reason))
            missing -= after - pool.desired
        if missing == 0:
            break
    return moves


def _may_grow(view: PolicyView, pool: PoolView) -> tuple[PoolLimits | None, str]:
    """Return the limits within which a pool may grow, or why it may not."""
    cool_down_s = view.config.up_cool_down_s
    if pool.is_pinned:
        return None, "where an operator pinned it"
    if pool.limits is None:
        return None, "having no limits to move between"
    if pool.desired >= pool.limits.max:
        return None, "its limit"
    if pool.grew_at is not None and view.now < pool.grew_at + cool_down_s:
        return None, f"having grown {view.now - pool.grew_at:.0f} s ago"
    return pool.limits, ""


# ----------------------------------------------------------------------------------------------- shrinking


def _shrinking(view: PolicyView, kind: ReplicaKind, lasting: ReplicaNeed) -> list[PoolMove]:
    """Return the move of the last pool that may shrink, by as many replicas as can be spared: the smaller
    kind serves more than the recent demand, and would have held the load that was there."""
    for_s = view.config.down_cool_down_s
    if not _may_kind_shrink(view, kind) or lasting.num_replicas is None:
        return []
    surplus = kind.num_desired - lasting.num_replicas
    pool = next((pool for pool in reversed(kind.pools) if _may_shrink(view, pool)), None)
    if surplus < 1 or pool is None or pool.limits is None:
        return []
    least = pool.limits.min
    for step in range(surplus, 0, -1):
        after = max(pool.desired - step, least)
        if after < pool.desired and view.can_spare(kind.name, for_s, pool.desired - after):
            demand = f"{HYSTERESIS:g} times the demand of the last {for_s:g} s"
            reason = f"{lasting.num_replicas} would serve {demand}: {lasting.reason}"
            return [PoolMove(pool.name, pool.desired, after, reason)]
    return []


def _may_kind_shrink(view: PolicyView, kind: ReplicaKind) -> bool:
    """Return whether every ordered replica is there and reports its load, nothing is short or borrowed, and
    the kind was watched for long enough."""
    is_settled = all(view.latest.num_ready(pool.name) == pool.desired for pool in kind.pools)
    is_known = all(replica.is_known for replica in view.latest.replicas)
    is_watched = view.history.covered_s >= view.config.down_cool_down_s
    return (
        is_settled and is_known and is_watched and not kind.num_borrowed and kind.name not in view.shortages
    )


def _may_shrink(view: PolicyView, pool: PoolView) -> bool:
    if pool.limits is None or pool.is_pinned or pool.desired <= pool.limits.min:
        return False
    return pool.changed_at is None or view.now >= pool.changed_at + view.config.down_cool_down_s


def _into_limits(view: PolicyView, pools: Sequence[PoolView]) -> list[PoolMove]:
    """Return the moves of pools that an operator left outside of their limits and released; downwards one by
    one."""
    moves = []
    for pool in pools:
        if pool.limits is None or pool.is_pinned:
            continue
        least, most = pool.limits.min, pool.limits.max
        if pool.desired < least:
            moves.append(PoolMove(pool.name, pool.desired, least, f"below its limit of {least}"))
        elif pool.desired > most and _may_shrink(view, pool):
            moves.append(PoolMove(pool.name, pool.desired, pool.desired - 1, f"above its limit of {most}"))
    return moves
