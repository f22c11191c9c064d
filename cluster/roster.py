"""Who serves: replicas, gateways and stores register here and everyone watches by long poll.

`Roster` is the pure state. `LocalRoster` carries it in process (tests, simulation); `RosterActor` is the
plain class that `cluster.app` makes a named Ray actor of. A member renews its registration periodically,
which is also how a restarted actor is filled again; meanwhile the members' last view stays in force.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from cluster.errors import RosterAwayError
from cluster.messages import GatewayRecord, ReplicaRecord, RosterView, StoreRecord
from kvtransfer.clock import Clock
from kvtransfer.wire import Codec

T = TypeVar("T")
RENEW_S = 2.0
"""How often a member renews its registration."""
EXPIRE_S = 10.0
"""A member that has not renewed for this long is gone."""
NUM_REMOVED = 4096
"""Removed members that are remembered; the oldest are forgotten first."""
REBUILD_S = 6.0
"""How long a restarted actor collects registrations before it shows its view."""


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


class Roster:
    """The state: members with epochs, desired counts, a version that grows with every visible change.

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
        self._desired: dict[str, int] = {}

    @property
    def version(self) -> int:
        return self._version

    def view(self) -> RosterView:
        return RosterView(
            version=self._version,
            replicas=tuple(self._replicas[key] for key in sorted(self._replicas)),
            gateways=tuple(self._gateways[key] for key in sorted(self._gateways)),
            desired=dict(self._desired),
            stores=tuple(self._stores[key] for key in sorted(self._stores)),
        )

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

    def set_desired(self, pool: str, num_replicas: int) -> None:
        """What the pool's scaler, or an operator, wants."""
        if self._desired.get(pool) != num_replicas:
            self._desired[pool] = num_replicas
            self._version += 1

    def restore_desired(self, desired: dict[str, int]) -> None:
        """A watcher's memory of the desired counts: taken for the pools this incarnation knows nothing of."""
        for pool, num_replicas in desired.items():
            if pool not in self._desired:
                self.set_desired(pool, num_replicas)

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

    async def set_desired(self, pool: str, num_replicas: int) -> None:
        await self._apply(lambda: self._roster.set_desired(pool, num_replicas))

    async def restore_desired(self, desired: dict[str, int]) -> None:
        await self._apply(lambda: self._roster.restore_desired(desired))

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


class RosterActor:
    """What runs in the roster's actor: `LocalRoster` behind frames.

    A restarted actor shows its view only after `REBUILD_S`, when every living member has registered again;
    until then `view` answers version 0, which watchers ignore.
    """

    def __init__(self, clock: Clock, *, restarted: bool) -> None:
        first_version = int(clock.wall() * 1000)
        self._clock = clock
        self._roster = LocalRoster(clock, first_version=first_version, expire_s=EXPIRE_S)
        self._complete_at = clock.now() + (REBUILD_S if restarted else 0.0)

    async def register_replica(self, frame: bytes) -> bool:
        return await self._roster.register_replica(_REPLICA_CODEC.decode(frame))

    async def register_gateway(self, frame: bytes) -> bool:
        return await self._roster.register_gateway(_GATEWAY_CODEC.decode(frame))

    async def register_store(self, frame: bytes) -> bool:
        return await self._roster.register_store(_STORE_CODEC.decode(frame))

    async def remove(self, member_id: str, epoch: int) -> None:
        await self._roster.remove(member_id, epoch)

    async def set_desired(self, pool: str, num_replicas: int) -> None:
        await self._roster.set_desired(pool, num_replicas)

    async def restore_desired(self, desired: dict[str, int]) -> None:
        await self._roster.restore_desired(desired)

    async def view(self, after_version: int, timeout_s: float) -> bytes:
        rebuilding_s = self._complete_at - self._clock.now()
        if rebuilding_s > 0:
            await self._clock.sleep(min(timeout_s, rebuilding_s))
            if rebuilding_s > timeout_s:
                return VIEW_CODEC.encode(RosterView(version=0))
        return VIEW_CODEC.encode(await self._roster.view(after_version, timeout_s))


class RemoteRoster:
    """A `RosterClient` over a `RosterActor` somewhere else. `call(method, *arguments)` reaches it, or raises
    `RosterAwayError`: then registrations count as accepted (they are renewed) and `view` is the last one."""

    def __init__(self, call: Callable[..., Awaitable[object]], clock: Clock) -> None:
        self._call = call
        self._clock = clock
        self._last = RosterView(version=0)

    async def register_replica(self, record: ReplicaRecord) -> bool:
        return await self._register("register_replica", _REPLICA_CODEC.encode(record))

    async def register_gateway(self, record: GatewayRecord) -> bool:
        return await self._register("register_gateway", _GATEWAY_CODEC.encode(record))

    async def register_store(self, record: StoreRecord) -> bool:
        return await self._register("register_store", _STORE_CODEC.encode(record))

    async def remove(self, member_id: str, epoch: int) -> None:
        with contextlib.suppress(RosterAwayError):
            await self._call("remove", member_id, epoch)

    async def set_desired(self, pool: str, num_replicas: int) -> None:
        """Record what the pool's scaler wants; `RosterAwayError` when it could not be recorded."""
        await self._call("set_desired", pool, num_replicas)

    async def view(self, after_version: int, timeout_s: float) -> RosterView:
        """The last view when the actor is away or rebuilding, after a wait, so that callers do not spin."""
        if self._last.version > after_version:
            after_version, timeout_s = self._last.version, 0.0
        try:
            frame = await self._call("view", after_version, timeout_s)
        except RosterAwayError:
            await self._clock.sleep(min(timeout_s, RENEW_S))
            return self._last
        assert isinstance(frame, bytes)
        view = VIEW_CODEC.decode(frame)
        if view.version > self._last.version:
            forgotten = {pool: num for pool, num in self._last.desired.items() if pool not in view.desired}
            self._last = view
            if forgotten:
                await self._restore(forgotten)
        return self._last

    async def _register(self, method: str, frame: bytes) -> bool:
        try:
            return bool(await self._call(method, frame))
        except RosterAwayError:
            return True

    async def _restore(self, desired: dict[str, int]) -> None:
        with contextlib.suppress(RosterAwayError):
            await self._call("restore_desired", desired)


async def keep_registered(
    register: Callable[[], Awaitable[bool]], clock: Clock, renew_s: float = RENEW_S
) -> None:
    """Renew a registration until cancelled; returns when the roster says that this life is over."""
    while await register():
        await clock.sleep(renew_s)


_REPLICA_CODEC: Codec[ReplicaRecord] = Codec(ReplicaRecord)
_GATEWAY_CODEC: Codec[GatewayRecord] = Codec(GatewayRecord)
_STORE_CODEC: Codec[StoreRecord] = Codec(StoreRecord)
VIEW_CODEC: Codec[RosterView] = Codec(RosterView)
