"""Pools without any replica while nothing is asked for: those whose `min` is 0."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.scaling.policy_input import PolicyView
from cluster.scaling.scaling_plan import PoolMove


def moves_to_zero(view: PolicyView) -> Iterator[PoolMove]:
    """Yield the moves of pools that may have no replica, once the whole cluster was unused for
    `zero_after_s`."""
    for_s = view.config.zero_after_s
    movable = [pool for kind in view.kinds.values() for pool in kind.pools if not pool.is_pinned]
    emptied = [pool for pool in movable if pool.limits is not None and pool.limits.min == 0 and pool.desired]
    if emptied and view.history.covered_s >= for_s and is_unused(view, for_s):
        for pool in emptied:
            yield PoolMove(pool.name, pool.desired, 0, f"nothing was asked for in {for_s:g} s")


def is_unused(view: PolicyView, for_s: float) -> bool:
    """Return whether no request came in this time, as far as it was watched, and none is left at any
    replica."""
    samples = view.history.since(view.now - for_s)
    if any(sample.demand.num_arrived or sample.demand.num_refused for sample in samples):
        return False
    return all(replica.is_idle for replica in view.latest.replicas)
