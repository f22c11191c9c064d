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
    DropLease,
    ForgetPool,
    GatewayRecord,
    MemberRecord,
    Observed,
    ReleasePool,
    ReplicaRecord,
    RoleLease,
    RosterOrder,
    RosterView,
    ScalingChange,
    SetDesired,
    SetTraffic,
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

    async def register(self, record: MemberRecord) -> bool:
        """Register, update or renew. False: a newer life of this id is registered, so the caller is over."""

    async def remove(self, member_id: str, epoch: int) -> None:
        """Remove the member in this life or an earlier one; that life cannot register again."""

    async def view(self, after_version: int, timeout_s: float) -> RosterView:
        """The view, at once when newer than `after_version`, else when it changes or after `timeout_s`."""


class ScalingRoster(RosterClient, Protocol):
    """What the scaler and the commands see of the roster."""

    async def change(self, order: RosterOrder) -> None:
        """Remember the order; `RosterAwayError` when it could not be recorded."""


class Roster:
    """The state: members with epochs, the desired state, a version that grows with every visible change.

    Times are passed in (seconds of one monotonic clock). `first_version` must grow from one incarnation of
    the roster to the next, so that watchers see the versions of all incarnations in order.
    """

    def __init__(self, first_version: int = 0) -> None:
        self._version = first_version
        self._members: dict[str, MemberRecord] = {}
        self._renewed_at: dict[str, float] = {}
        self._removed_epoch: dict[str, int] = {}
        self._desired = DesiredState(first_version)

    @property
    def version(self) -> int:
        return self._version

    def view(self) -> RosterView:
        members = RosterView(
            version=self._version,
            replicas=self._of(ReplicaRecord),
            gateways=self._of(GatewayRecord),
            stores=self._of(StoreRecord),
        )
        return self._desired.fill(members)

    def register(self, record: MemberRecord, now: float) -> bool:
        """False when the record's epoch is over: a newer one is registered, or this one was removed."""
        known = self._members.get(record.member_id)
        removed_epoch = self._removed_epoch.get(record.member_id)
        if known is not None and record.epoch < known.epoch:
            return False
        if removed_epoch is not None and record.epoch <= removed_epoch:
            return False
        self._renewed_at[record.member_id] = now
        if known != record:
            self._members[record.member_id] = record
            self._version += 1
        return True

    def remove(self, member_id: str, epoch: int) -> bool:
        """True when the member was registered with this epoch or an earlier one, and now is not."""
        self._removed_epoch[member_id] = max(epoch, self._removed_epoch.pop(member_id, epoch))
        if len(self._removed_epoch) > NUM_REMOVED:
            del self._removed_epoch[next(iter(self._removed_epoch))]
        known = self._members.get(member_id)
        if known is None or known.epoch > epoch:
            return False
        self._forget(member_id)
        return True

    def expire(self, now: float, expire_s: float) -> list[str]:
        """Drop the members that have not renewed for `expire_s`; they may register again."""
        gone = [member_id for member_id, at in self._renewed_at.items() if now - at > expire_s]
        for member_id in gone:
            self._forget(member_id)
        return gone

    def change(self, order: RosterOrder) -> None:
        """Remember the order."""
        self._version += self._desired.change(order)

    def restore(self, memory: RosterView) -> None:
        """Take back what an earlier life of the roster remembered."""
        self._version += self._desired.restore(memory)

    def _of(self, kind: type[T]) -> tuple[T, ...]:
        return tuple(record for _, record in sorted(self._members.items()) if isinstance(record, kind))

    def _forget(self, member_id: str) -> None:
        del self._members[member_id], self._renewed_at[member_id]
        self._version += 1


class LocalRoster:
    """The roster in this process: a `RosterClient` over `Roster`. Without `expire_s` none need renew."""

    def __init__(self, clock: Clock, *, first_version: int = 0, expire_s: float | None = None) -> None:
        self._clock = clock
        self._expire_s = expire_s
        self._roster = Roster(first_version)
        self._changed = asyncio.Condition()

    async def register(self, record: MemberRecord) -> bool:
        return await self._apply(lambda: self._roster.register(record, self._clock.now()))

    async def remove(self, member_id: str, epoch: int) -> None:
        await self._apply(lambda: self._roster.remove(member_id, epoch))

    async def change(self, order: RosterOrder) -> None:
        await self._apply(lambda: self._roster.change(order))

    async def restore(self, memory: RosterView) -> RosterView:
        """Restore the orders that an earlier life of the roster had; returns the view with them."""
        await self._apply(lambda: self._roster.restore(memory))
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
_NOBODY = RosterView(version=0)


class DesiredPool(NamedTuple):
    """What is wanted of a pool, and whether an operator said so."""

    num_replicas: int
    pinned: bool


class DesiredState:
    """Represents what was ordered. `change` and `restore` return whether the view of it changed.

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

    def change(self, order: RosterOrder) -> bool:
        """Carry out an order."""
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
