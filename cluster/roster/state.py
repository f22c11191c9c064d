"""Who serves: replicas, gateways and stores register here and everyone watches by long poll.

`Roster` is the pure state. `LocalRoster` carries it in process (tests, simulation); `cluster.roster.actor`
has the class that becomes a named Ray actor, and what calls it. A member renews its registration
periodically, which also fills a restarted actor again; meanwhile the members' last view stays in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from cluster.roster.messages import (
    GatewayRecord,
    ReplicaRecord,
    RoleLease,
    RosterView,
    ScalingMove,
    StoreRecord,
)
from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity

T = TypeVar("T")
# How often a member renews its registration.
RENEW_S = 2.0
# A member that has not renewed for this long is gone.
EXPIRE_S = 10.0
# Removed members that are remembered; the oldest are forgotten first.
NUM_REMOVED = 4096
# How long a restarted actor collects registrations before it shows its view.
REBUILD_S = 6.0


class RosterClient(Protocol):
    """What a replica or a gateway sees of the roster."""

    async def register_replica(self, record: ReplicaRecord) -> bool:
        """Register, update or renew. False: a newer life of this id is registered, so the caller is over."""

    async def register_gateway(self, record: GatewayRecord) -> bool:
        """As `register_replica`."""

    async def register_store(self, record: StoreRecord) -> bool:
        """As `register_replica`."""

    async def remove(self, member_id: str, epoch: int) -> None:
        """Remove the member in this life or an earlier one; that life cannot register again."""

    async def view(self, after_version: int, timeout_s: float) -> RosterView:
        """The view, at once when newer than `after_version`, else when it changes or after `timeout_s`."""


class ScalingRoster(RosterClient, Protocol):
    """What the scaler and the commands see of the roster: each of these raises `RosterAwayError` when it
    could not be recorded."""

    async def set_desired(self, pool: str, num_replicas: int, pinned: bool) -> None:
        """What somebody wants of the pool; `pinned`: an operator, so the autoscaler leaves it alone."""

    async def release(self, pool: str) -> None:
        """Unpin: the autoscaler may move it again."""

    async def forget(self, pool: str) -> None:
        """Nothing is wanted of the pool: the configuration's count is right."""

    async def set_lease(self, lease: RoleLease) -> None:
        """Taken when its epoch is higher than that of the replica's lease so far."""

    async def drop_lease(self, replica: ReplicaIdentity) -> None:
        """The replica of this life is gone."""

    async def add_move(self, move: ScalingMove) -> None:
        """Remember it with the latest."""

    async def set_traffic(self, shares: dict[str, float]) -> None:
        """The share of this application's requests that each application gets; empty: all stay."""

    async def set_observed(self, deploy_mark: str, targets: dict[str, int], declared: dict[str, int]) -> None:
        """What the scaler saw of Ray Serve, for its next life."""


class Roster:
    """The state: members with epochs, the desired state, a version that grows with every visible change.

    Times are passed in (seconds of one monotonic clock). `first_version` must grow from one incarnation of
    the roster to the next, so that watchers see the versions of all incarnations in order.
    """

    def __init__(self, first_version: int = 0) -> None:
        self._version = first_version
        self._replicas: dict[str, ReplicaRecord] = {}
        self._gateways: dict[str, GatewayRecord] = {}
        self._stores: dict[str, StoreRecord] = {}
        self._renewed_at: dict[str, float] = {}
        self._removed_epoch: dict[str, int] = {}
        self._desired = DesiredState(first_version)

    @property
    def version(self) -> int:
        return self._version

    def view(self) -> RosterView:
        members = RosterView(
            version=self._version,
            replicas=tuple(self._replicas[key] for key in sorted(self._replicas)),
            gateways=tuple(self._gateways[key] for key in sorted(self._gateways)),
            stores=tuple(self._stores[key] for key in sorted(self._stores)),
        )
        return self._desired.fill(members)

    def register_replica(self, record: ReplicaRecord, now: float) -> bool:
        """False when the record's epoch is over: a newer one is registered, or this one was removed."""
        replica_id, epoch = record.identity.replica_id, record.identity.epoch
        known = self._replicas.get(replica_id)
        if self._is_over(replica_id, epoch, known.identity.epoch if known else None):
            return False
        self._renewed_at[replica_id] = now
        if known != record:
            self._replicas[replica_id] = record
            self._version += 1
        return True

    def register_gateway(self, record: GatewayRecord, now: float) -> bool:
        """As `register_replica`."""
        known = self._gateways.get(record.gateway_id)
        if self._is_over(record.gateway_id, record.epoch, known.epoch if known else None):
            return False
        self._renewed_at[record.gateway_id] = now
        if known != record:
            self._gateways[record.gateway_id] = record
            self._version += 1
        return True

    def register_store(self, record: StoreRecord, now: float) -> bool:
        """As `register_replica`."""
        known = self._stores.get(record.member_id)
        if self._is_over(record.member_id, record.epoch, known.epoch if known else None):
            return False
        self._renewed_at[record.member_id] = now
        if known != record:
            self._stores[record.member_id] = record
            self._version += 1
        return True

    def remove(self, member_id: str, epoch: int) -> bool:
        """True when the member was registered with this epoch or an earlier one, and now is not."""
        self._removed_epoch[member_id] = max(epoch, self._removed_epoch.pop(member_id, epoch))
        if len(self._removed_epoch) > NUM_REMOVED:
            del self._removed_epoch[next(iter(self._removed_epoch))]
        replica = self._replicas.get(member_id)
        other = self._gateways.get(member_id) or self._stores.get(member_id)
        registered = replica.identity.epoch if replica else other.epoch if other else None
        if registered is None or registered > epoch:
            return False
        self._forget(member_id)
        return True

    def expire(self, now: float, expire_s: float) -> list[str]:
        """Drop the members that have not renewed for `expire_s`; they may register again."""
        gone = [member_id for member_id, at in self._renewed_at.items() if now - at > expire_s]
        for member_id in gone:
            self._forget(member_id)
        return gone

    def change(self, change: Callable[[DesiredState], bool]) -> None:
        """Change what is remembered."""
        if change(self._desired):
            self._version += 1

    def _is_over(self, member_id: str, epoch: int, registered: int | None) -> bool:
        removed = self._removed_epoch.get(member_id)
        return (registered is not None and epoch < registered) or (removed is not None and epoch <= removed)

    def _forget(self, member_id: str) -> None:
        self._replicas.pop(member_id, None)
        self._gateways.pop(member_id, None)
        self._stores.pop(member_id, None)
        self._renewed_at.pop(member_id, None)
        self._version += 1


class LocalRoster:
    """The roster in this process: a `RosterClient` over `Roster`. Without `expire_s` none need renew."""

    def __init__(self, clock: Clock, *, first_version: int = 0, expire_s: float | None = None) -> None:
        self._clock = clock
        self._expire_s = expire_s
        self._roster = Roster(first_version)
        self._changed = asyncio.Condition()

    async def register_replica(self, record: ReplicaRecord) -> bool:
        return await self._apply(lambda: self._roster.register_replica(record, self._clock.now()))

    async def register_gateway(self, record: GatewayRecord) -> bool:
        return await self._apply(lambda: self._roster.register_gateway(record, self._clock.now()))

    async def register_store(self, record: StoreRecord) -> bool:
        return await self._apply(lambda: self._roster.register_store(record, self._clock.now()))

    async def remove(self, member_id: str, epoch: int) -> None:
        await self._apply(lambda: self._roster.remove(member_id, epoch))

    async def set_desired(self, pool: str, num_replicas: int, pinned: bool) -> None:
        await self._change(lambda state: state.set_desired(pool, num_replicas, pinned=pinned))

    async def release(self, pool: str) -> None:
        await self._change(lambda state: state.release(pool))

    async def forget(self, pool: str) -> None:
        await self._change(lambda state: state.forget(pool))

    async def set_lease(self, lease: RoleLease) -> None:
        await self._change(lambda state: state.set_lease(lease))

    async def drop_lease(self, replica: ReplicaIdentity) -> None:
        await self._change(lambda state: state.drop_lease(replica))

    async def add_move(self, move: ScalingMove) -> None:
        await self._change(lambda state: state.add_move(move))

    async def set_traffic(self, shares: dict[str, float]) -> None:
        await self._change(lambda state: state.set_traffic(shares))

    async def set_observed(self, deploy_mark: str, targets: dict[str, int], declared: dict[str, int]) -> None:
        await self._change(lambda state: state.set_observed(deploy_mark, targets, declared))

    async def restore(self, memory: RosterView) -> RosterView:
        """Restore the orders that an earlier life of the roster had; returns the view with them."""
        await self._change(lambda state: state.restore(memory))
        return self._roster.view()

    async def view(self, after_version: int, timeout_s: float) -> RosterView:
        async with self._changed:
            self._expire()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self._roster.version > after_version)
            except TimeoutError:
                self._expire()
            return self._roster.view()

    async def _change(self, change: Callable[[DesiredState], bool]) -> None:
        await self._apply(lambda: self._roster.change(change))

    async def _apply(self, change: Callable[[], T]) -> T:
        async with self._changed:
            before = self._roster.version
            self._expire()
            result = change()
            if self._roster.version != before:
                self._changed.notify_all()
            return result

    def _expire(self) -> None:
        if self._expire_s is not None:
            self._roster.expire(self._clock.now(), self._expire_s)


async def keep_registered(
    register: Callable[[], Awaitable[bool]], clock: Clock, renew_s: float = RENEW_S
) -> None:
    """Renew a registration until cancelled; returns when the roster says that this life is over."""
    while await register():
        await clock.sleep(renew_s)


# ----------------------------------------------------------------------------------------------
# The orders that the roster remembers: counts, pins, role leases, moves, traffic. Outlives the roster.
#
# A new life of the roster begins without any of it; watchers then give it what they saw last (`restore`).

# Moves that are remembered; the oldest are forgotten first.
NUM_MOVES = 100


class DesiredPool(NamedTuple):
    """What is wanted of a pool, and whether an operator said so."""

    num_replicas: int
    pinned: bool


class DesiredState:
    """The state. Every method that changes something says whether it did.

    `first_version` is that of this life of the roster. What was ordered in this life is never overridden by a
    memory, and of several memories the latest counts.
    """

    def __init__(self, first_version: int = 0) -> None:
        self._first_version = first_version
        self._restored_version = -1
        self._pools: dict[str, DesiredPool] = {}
        self._leases: dict[str, RoleLease] = {}
        self._moves: tuple[ScalingMove, ...] = ()
        self._traffic: dict[str, float] = {}
        self._targets: dict[str, int] = {}
        self._declared: dict[str, int] = {}
        self._deploy_mark = ""
        # Kind and key of what was ordered in this life.
        self._own: set[tuple[str, str]] = set()

    def fill(self, view: RosterView) -> RosterView:
        """The view of the members, with the desired state added."""
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

    def set_desired(self, pool: str, num_replicas: int, *, pinned: bool) -> bool:
        wanted = DesiredPool(num_replicas, pinned)
        self._own.add(("pool", pool))
        changed = self._pools.get(pool) != wanted
        self._pools[pool] = wanted
        return changed

    def release(self, pool: str) -> bool:
        """The pool is nobody's choice any more; its count stays until somebody changes it."""
        known = self._pools.get(pool)
        if known is None or not known.pinned:
            return False
        return self.set_desired(pool, known.num_replicas, pinned=False)

    def forget(self, pool: str) -> bool:
        """Nothing is wanted of the pool: the configuration's count is right."""
        self._own.add(("pool", pool))
        return self._pools.pop(pool, None) is not None

    def set_lease(self, lease: RoleLease) -> bool:
        """Taken when its epoch is higher than that of the replica's lease so far, in this life or another."""
        key = lease.replica.replica_id
        known = self._leases.get(key)
        if known is not None and (lease.epoch, lease.replica.epoch) <= (known.epoch, known.replica.epoch):
            return False
        self._own.add(("lease", key))
        self._leases[key] = lease
        return True

    def drop_lease(self, replica: ReplicaIdentity) -> bool:
        """The lease of this life of the replica, or of an earlier one, is over."""
        key = replica.replica_id
        known = self._leases.get(key)
        if known is None or known.replica.epoch > replica.epoch:
            return False
        self._own.add(("lease", key))
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
        self._own.add(("traffic", ""))
        changed = self._traffic != shares
        self._traffic = dict(shares)
        return changed

    def set_observed(self, deploy_mark: str, targets: Mapping[str, int], declared: Mapping[str, int]) -> bool:
        """What the scaler saw of Ray Serve."""
        self._own.add(("observed", ""))
        before = self._deploy_mark, self._targets, self._declared
        self._deploy_mark, self._targets, self._declared = deploy_mark, dict(targets), dict(declared)
        return before != (deploy_mark, self._targets, self._declared)

    def restore(self, memory: RosterView) -> bool:
        """Take what was not ordered in this life from what a watcher saw of an earlier one."""
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

    def _with_own(self, kind: str, own: dict[str, T], remembered: Mapping[str, T]) -> dict[str, T]:
        kept = {key: value for key, value in own.items() if (kind, key) in self._own}
        return {key: value for key, value in remembered.items() if (kind, key) not in self._own} | kept


def _latest(moves: Iterable[ScalingMove]) -> tuple[ScalingMove, ...]:
    return tuple(sorted(moves, key=lambda move: move.at)[-NUM_MOVES:])
