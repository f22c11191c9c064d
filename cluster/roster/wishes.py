"""What the roster was told to remember: counts, pins, role leases, moves, traffic. Outlives the roster.

A new life of the roster begins without any of it; watchers then give it what they saw last (`restore`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from cluster.roster.messages import RoleLease, RosterView, ScalingMove
from kvtransfer.messages import ReplicaIdentity

T = TypeVar("T")
NUM_MOVES = 100
"""Moves that are remembered; the oldest are forgotten first."""


class PoolWish(NamedTuple):
    """What is wanted of a pool, and whether an operator said so."""

    num_replicas: int
    pinned: bool


class Wishes:
    """The state. Every method that changes something says whether it did.

    `first_version` is that of this life of the roster. What was told to this life is never overridden by a
    memory, and of several memories the latest counts.
    """

    def __init__(self, first_version: int = 0) -> None:
        self._first_version = first_version
        self._restored_version = -1
        self._pools: dict[str, PoolWish] = {}
        self._leases: dict[str, RoleLease] = {}
        self._moves: tuple[ScalingMove, ...] = ()
        self._traffic: dict[str, float] = {}
        self._targets: dict[str, int] = {}
        self._declared: dict[str, int] = {}
        self._deploy_mark = ""
        self._told: set[tuple[str, str]] = set()
        """Kind and key of what this life was told."""

    def fill(self, view: RosterView) -> RosterView:
        """The view of the members, with the wishes added."""
        return RosterView(
            version=view.version,
            replicas=view.replicas,
            gateways=view.gateways,
            stores=view.stores,
            desired={pool: wish.num_replicas for pool, wish in sorted(self._pools.items())},
            pinned=tuple(pool for pool, wish in sorted(self._pools.items()) if wish.pinned),
            leases=tuple(self._leases[key] for key in sorted(self._leases)),
            moves=self._moves,
            traffic=dict(self._traffic),
            targets=dict(self._targets),
            declared=dict(self._declared),
            deploy_mark=self._deploy_mark,
            incarnation=self._first_version,
        )

    def set_desired(self, pool: str, num_replicas: int, *, pinned: bool) -> bool:
        wish = PoolWish(num_replicas, pinned)
        self._told.add(("pool", pool))
        changed = self._pools.get(pool) != wish
        self._pools[pool] = wish
        return changed

    def release(self, pool: str) -> bool:
        """The pool is nobody's choice any more; its count stays until somebody changes it."""
        wish = self._pools.get(pool)
        if wish is None or not wish.pinned:
            return False
        return self.set_desired(pool, wish.num_replicas, pinned=False)

    def forget(self, pool: str) -> bool:
        """Nothing is wanted of the pool: the configuration's count is right."""
        self._told.add(("pool", pool))
        return self._pools.pop(pool, None) is not None

    def set_lease(self, lease: RoleLease) -> bool:
        """Taken when its epoch is higher than that of the replica's lease so far, in this life or another."""
        key = lease.replica.replica_id
        known = self._leases.get(key)
        if known is not None and (lease.epoch, lease.replica.epoch) <= (known.epoch, known.replica.epoch):
            return False
        self._told.add(("lease", key))
        self._leases[key] = lease
        return True

    def drop_lease(self, replica: ReplicaIdentity) -> bool:
        """The lease of this life of the replica, or of an earlier one, is over."""
        key = replica.replica_id
        known = self._leases.get(key)
        if known is None or known.replica.epoch > replica.epoch:
            return False
        self._told.add(("lease", key))
        del self._leases[key]
        return True

    def add_move(self, move: ScalingMove) -> bool:
        """False when it is known already."""
        if move in self._moves:
            return False
        self._moves = _latest((*self._moves, move))
        return True

    def set_traffic(self, shares: Mapping[str, float]) -> bool:
        """Shares by application; empty: all requests stay."""
        self._told.add(("traffic", ""))
        changed = self._traffic != shares
        self._traffic = dict(shares)
        return changed

    def set_observed(self, deploy_mark: str, targets: Mapping[str, int], declared: Mapping[str, int]) -> bool:
        """What the scaler saw of Ray Serve."""
        self._told.add(("observed", ""))
        before = self._deploy_mark, self._targets, self._declared
        self._deploy_mark, self._targets, self._declared = deploy_mark, dict(targets), dict(declared)
        return before != (deploy_mark, self._targets, self._declared)

    def restore(self, memory: RosterView) -> bool:
        """Take what this life was not told from what a watcher saw of an earlier one."""
        if not self._restored_version < memory.version <= self._first_version:
            return False
        if memory.incarnation == self._first_version:
            return False
        self._restored_version = memory.version
        before = self.fill(memory)
        pinned = set(memory.pinned)
        self._pools = self._with_told(
            "pool", self._pools, {pool: PoolWish(num, pool in pinned) for pool, num in memory.desired.items()}
        )
        remembered = {lease.replica.replica_id: lease for lease in memory.leases}
        self._leases = self._with_told("lease", self._leases, remembered)
        self._moves = _latest({move: None for move in (*memory.moves, *self._moves)})
        if ("traffic", "") not in self._told:
            self._traffic = dict(memory.traffic)
        if ("observed", "") not in self._told:
            self._deploy_mark, self._targets = memory.deploy_mark, dict(memory.targets)
            self._declared = dict(memory.declared)
        return self.fill(memory) != before

    def _with_told(self, kind: str, own: dict[str, T], remembered: Mapping[str, T]) -> dict[str, T]:
        told = {key: value for key, value in own.items() if (kind, key) in self._told}
        return {key: value for key, value in remembered.items() if (kind, key) not in self._told} | told


def _latest(moves: Iterable[ScalingMove]) -> tuple[ScalingMove, ...]:
    return tuple(sorted(moves, key=lambda move: move.at)[-NUM_MOVES:])
