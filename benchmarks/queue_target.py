"""A plain scaling policy to compare the own one with: a target for the requests of each replica."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.scaling.config import ScalingConfig
from cluster.scaling.reactive import NUM_SAMPLES
from cluster.scaling.samples import PREFILL, History, PoolView, ScalingSample
from cluster.scaling.scaling_plan import PoolMove, ScalingPlan


class QueueTarget:
    """Scale each pool by itself, as many autoscalers do: as many replicas as hold its requests at the target
    of its role. Growth is immediate, and a pool shrinks to the most that it needed in `down_cool_down_s`."""

    def __init__(self, prefill_target: float, decode_target: float) -> None:
        self._targets = {True: prefill_target, False: decode_target}

    def __call__(
        self, history: History, config: ScalingConfig, pools: Sequence[PoolView], now: float
    ) -> ScalingPlan:
        """Return at most one move for each pool."""
        moves = [self._move(history, config, pool, now) for pool in pools]
        return ScalingPlan(tuple(move for move in moves if move is not None))

    def _move(self, history: History, config: ScalingConfig, pool: PoolView, now: float) -> PoolMove | None:
        if pool.limits is None:
            return None
        target = self._targets[pool.role == PREFILL]
        wanted = [
            _num_requests(sample, pool.name) / target
            for sample in history.since(now - config.down_cool_down_s)
        ]
        if not wanted:
            return None
        latest = wanted[-NUM_SAMPLES:]
        up, down = math.ceil(sum(latest) / len(latest)), math.ceil(max(wanted))
        count = up if up > pool.desired else min(down, pool.desired)
        count = min(max(count, pool.limits.min), pool.limits.max)
        is_up = count > pool.desired
        since, wait_s = (
            (pool.grew_at, config.up_cool_down_s) if is_up else (pool.changed_at, config.down_cool_down_s)
        )
        if count == pool.desired or (since is not None and now < since + wait_s):
            return None
        return PoolMove(pool.name, pool.desired, count, f"{up} would hold {target:g} requests each")


def _num_requests(sample: ScalingSample, pool: str) -> int:
    return sum(each.num_running + each.num_waiting for each in sample.replicas if each.pool == pool)
