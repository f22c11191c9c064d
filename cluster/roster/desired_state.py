"""Keep the orders that the roster remembers: counts, pins, role leases, moves, traffic.

They outlive the roster: a new life of it begins without them, and its watchers give it what they saw last
(`restore`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from cluster.roster.messages import (
    DropLease,
    ForgetPool,
    Observed,
    ReleasePool,
    RoleLease,
    RosterOrder,
    RosterView,
    ScalingChange,
    SetDesired,
    SetTraffic,
)
from kvtransfer.messages import ReplicaIdentity

T = TypeVar("T")


# Moves that are remembered; the oldest are forgotten first.
NUM_MOVES = 100
_NOBODY = RosterView(version=0)


class DesiredPool(NamedTuple):
    """The desired count of a pool, and whether an operator chose it."""

    num_replicas: int
    pinned: bool


class DesiredState:
    """Represents the orders. `change` and `restore` return whether the view of them changed.

    `first_version` is that of this life of the roster. What was ordered in this life is never overridden by a
    memory, and of several memories the latest counts.
    """

    def __init__(self, first_version: int = 0) -> None:
        self._first_version = first_version
        self._restored_version = -1
        self._pools: dict[str, DesiredPool] = {}
        self._leases: dict[str, RoleLease] = {}
        self._moves: tuple[ScalingChange, ...] = ()
        self._traffic: dict[str, float] = {}
        self._targets: dict[str, int] = {}
        self._declared: dict[str, int] = {}
        self._deploy_mark = ""
        # The kind and key of each order of this life.
        self._own: set[tuple[str, str]] = set()

    def fill(self, view: RosterView) -> RosterView:
        """Return the view of the members, with the desired state added."""
        return RosterView(
            version=view.version,
            replicas=view.replicas,
            gateways=view.gateways,
            stores=view.stores,
            desired={pool: it.num_replicas for pool, it in sorted(self._pools.items())},
            pinned=tuple(pool for pool, it in sorted(self._pools.items()) if it.pinned),
            leases=tuple(self._leases[key] for key in sorted(self._leases)),
            moves=self._moves,
            traffic=dict(self._traffic),
            targets=dict(self._targets),
            declared=dict(self._declared),
            deploy_mark=self._deploy_mark,
            incarnation=self._first_version,
        )

    def change(self, order: RosterOrder) -> bool:
        """Carry out an order; return whether it changed anything."""
        before = self.fill(_NOBODY)
        match order:
            case SetDesired(pool, num_replicas, pinned):
                self._own.add(("pool", pool))
                self._pools[pool] = DesiredPool(num_replicas, pinned)
            case ReleasePool(pool):
                known = self._pools.get(pool)
                if known is not None and known.pinned:
                    self._own.add(("pool", pool))
                    self._pools[pool] = known._replace(pinned=False)
            case ForgetPool(pool):
                self._own.add(("pool", pool))
                self._pools.pop(pool, None)
            case RoleLease():
                self._set_lease(order)
            case DropLease(replica):
                self._drop_lease(replica)
            case ScalingChange():
                self._moves = _latest({move: None for move in (*self._moves, order)})
            case SetTraffic(shares):
                self._own.add(("traffic", ""))
                self._traffic = dict(shares)
            case Observed(deploy_mark, targets, declared):
                self._own.add(("observed", ""))
                self._deploy_mark, self._targets, self._declared = deploy_mark, dict(targets), dict(declared)
        return self.fill(_NOBODY) != before

    def restore(self, memory: RosterView) -> bool:
        """Take the orders that were not given in this life from a watcher's view of an earlier one."""
        if not self._restored_version < memory.version <= self._first_version:
            return False
        if memory.incarnation == self._first_version:
            return False
        self._restored_version = memory.version
        before = self.fill(memory)
        pinned = set(memory.pinned)
        self._pools = self._with_own(
            "pool",
            self._pools,
            {pool: DesiredPool(num, pool in pinned) for pool, num in memory.desired.items()},
        )
        remembered = {lease.replica.replica_id: lease for lease in memory.leases}
        self._leases = self._with_own("lease", self._leases, remembered)
        self._moves = _latest({move: None for move in (*memory.moves, *self._moves)})
        if ("traffic", "") not in self._own:
            self._traffic = dict(memory.traffic)
        if ("observed", "") not in self._own:
            self._deploy_mark, self._targets = memory.deploy_mark, dict(memory.targets)
            self._declared = dict(memory.declared)
        return self.fill(memory) != before

    def _set_lease(self, lease: RoleLease) -> None:
        key = lease.replica.replica_id
        known = self._leases.get(key)
        if known is None or (lease.epoch, lease.replica.epoch) > (known.epoch, known.replica.epoch):
            self._own.add(("lease", key))
            self._leases[key] = lease

    def _drop_lease(self, replica: ReplicaIdentity) -> None:
        key = replica.replica_id
        known = self._leases.get(key)
        if known is not None and known.replica.epoch <= replica.epoch:
            self._own.add(("lease", key))
            del self._leases[key]

    def _with_own(self, kind: str, own: dict[str, T], remembered: Mapping[str, T]) -> dict[str, T]:
        kept = {key: value for key, value in own.items() if (kind, key) in self._own}
        return {key: value for key, value in remembered.items() if (kind, key) not in self._own} | kept


def _latest(moves: Iterable[ScalingChange]) -> tuple[ScalingChange, ...]:
    return tuple(sorted(moves, key=lambda move: move.at)[-NUM_MOVES:])
