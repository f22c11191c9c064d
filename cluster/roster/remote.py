"""The roster in an actor of its own: `RosterActor` there, `RemoteRoster` here, frames between them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from cluster.errors import RosterAwayError
from cluster.roster.messages import (
    GatewayRecord,
    ReplicaRecord,
    RoleLease,
    RosterView,
    ScalingMove,
    StoreRecord,
)
from cluster.roster.state import EXPIRE_S, REBUILD_S, RENEW_S, LocalRoster
from kvtransfer.codec import Codec
from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity


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

    async def set_desired(self, pool: str, num_replicas: int, pinned: bool) -> None:
        await self._roster.set_desired(pool, num_replicas, pinned)

    async def release(self, pool: str) -> None:
        await self._roster.release(pool)

    async def forget(self, pool: str) -> None:
        await self._roster.forget(pool)

    async def set_lease(self, frame: bytes) -> None:
        await self._roster.set_lease(_LEASE_CODEC.decode(frame))

    async def drop_lease(self, replica_id: str, epoch: int) -> None:
        await self._roster.drop_lease(ReplicaIdentity(replica_id, epoch))

    async def add_move(self, frame: bytes) -> None:
        await self._roster.add_move(_MOVE_CODEC.decode(frame))

    async def set_traffic(self, shares: dict[str, float]) -> None:
        await self._roster.set_traffic(shares)

    async def set_observed(self, deploy_mark: str, targets: dict[str, int], declared: dict[str, int]) -> None:
        await self._roster.set_observed(deploy_mark, targets, declared)

    async def restore(self, frame: bytes) -> bytes:
        return VIEW_CODEC.encode(await self._roster.restore(VIEW_CODEC.decode(frame)))

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

    def __init__(
        self, call: Callable[..., Awaitable[object]], clock: Clock, *, restores: bool = True
    ) -> None:
        """`restores`: another life of the roster is given what this watcher remembers of the one before."""
        self._call = call
        self._clock = clock
        self._restores = restores
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

    async def set_desired(self, pool: str, num_replicas: int, pinned: bool) -> None:
        await self._call("set_desired", pool, num_replicas, pinned)

    async def release(self, pool: str) -> None:
        await self._call("release", pool)

    async def forget(self, pool: str) -> None:
        await self._call("forget", pool)

    async def set_lease(self, lease: RoleLease) -> None:
        await self._call("set_lease", _LEASE_CODEC.encode(lease))

    async def drop_lease(self, replica: ReplicaIdentity) -> None:
        await self._call("drop_lease", replica.replica_id, replica.epoch)

    async def add_move(self, move: ScalingMove) -> None:
        await self._call("add_move", _MOVE_CODEC.encode(move))

    async def set_traffic(self, shares: dict[str, float]) -> None:
        await self._call("set_traffic", shares)

    async def set_observed(self, deploy_mark: str, targets: dict[str, int], declared: dict[str, int]) -> None:
        await self._call("set_observed", deploy_mark, targets, declared)

    async def view(self, after_version: int, timeout_s: float) -> RosterView:
        """The last view when the actor is away or rebuilding, after a wait, so that callers do not spin."""
        if self._last.version > after_version:
            after_version, timeout_s = self._last.version, 0.0
        try:
            view = _as_view(await self._call("view", after_version, timeout_s))
            is_new_life = view.version > self._last.version > 0 and view.incarnation != self._last.incarnation
            if is_new_life and self._restores:
                # The roster's new life has forgotten what it was told; nobody shall act on that.
                view = _as_view(await self._call("restore", VIEW_CODEC.encode(self._last)))
        except RosterAwayError:
            await self._clock.sleep(min(timeout_s, RENEW_S))
            return self._last
        if view.version > self._last.version:
            self._last = view
        return self._last

    async def _register(self, method: str, frame: bytes) -> bool:
        try:
            return bool(await self._call(method, frame))
        except RosterAwayError:
            return True


def _as_view(frame: object) -> RosterView:
    assert isinstance(frame, bytes)
    return VIEW_CODEC.decode(frame)


_REPLICA_CODEC: Codec[ReplicaRecord] = Codec(ReplicaRecord)
_GATEWAY_CODEC: Codec[GatewayRecord] = Codec(GatewayRecord)
_STORE_CODEC: Codec[StoreRecord] = Codec(StoreRecord)
_LEASE_CODEC: Codec[RoleLease] = Codec(RoleLease)
_MOVE_CODEC: Codec[ScalingMove] = Codec(ScalingMove)
VIEW_CODEC: Codec[RosterView] = Codec(RosterView)
