"""Which counts a deploy begins with: those that were ordered since the last one, not those of the file.

Serve stops what exceeds the deployed counts within a second, long before anybody could restore them.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.config import ClusterConfig
from cluster.roster.messages import RosterView
from kvtransfer.codec import Part


class KnownCounts(Part, frozen=True):
    """The ordered counts of the pools of an application, as far as they are known."""

    # Ordered counts by pool; absent where nobody ordered anything.
    desired: dict[str, int] = {}
    # Pools whose count an operator chose.
    pinned: tuple[str, ...] = ()
    # The count by pool in the configuration that was followed then.
    declared: dict[str, int] = {}


def counts_of(view: RosterView) -> KnownCounts:
    """Return the counts that the roster knows."""
    return KnownCounts(dict(view.desired), view.pinned, dict(view.declared))


def kept_counts(config: ClusterConfig, known: KnownCounts) -> KnownCounts:
    """Return the counts that hold under `config`. A pool that nobody pinned and that is not autoscaled
    follows the file where the file gives another count than before; pools that are gone are dropped."""
    autoscaled = config.scaling.autoscaled
    desired = {}
    for pool in config.pools:
        is_chosen = pool.name in known.pinned or pool.name in autoscaled
        is_as_before = known.declared.get(pool.name, pool.replicas) == pool.replicas
        if pool.name in known.desired and (is_chosen or is_as_before):
            desired[pool.name] = known.desired[pool.name]
    return KnownCounts(
        desired=desired,
        pinned=tuple(name for name in known.pinned if name in desired),
        declared={pool.name: pool.replicas for pool in config.pools},
    )


def counts_to_deploy(config: ClusterConfig, known: KnownCounts) -> Mapping[str, int]:
    """Return the count that each pool of `config` is deployed with."""
    desired = kept_counts(config, known).desired
    return {pool.name: desired.get(pool.name, pool.replicas) for pool in config.pools}
