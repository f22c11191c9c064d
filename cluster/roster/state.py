"""The members that serve: replicas, gateways and stores register here, and everyone watches by long poll.

`Roster` is the pure state. `LocalRoster` carries it in process (tests, simulation); `cluster.roster.actor`
has the class that becomes a named Ray actor, and its caller. A member renews its registration periodically,
which also fills a restarted actor again; until then the members' last view stays in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from cluster.roster.desired_state import DesiredState
from cluster.roster.messages import (
    GatewayRecord,
    MemberRecord,
    ReplicaRecord,
    RosterOrder,
    RosterView,
    StoreRecord,
)
from kvtransfer.common.clock import Clock

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
    """The view that a replica or a gateway has of the roster."""

    async def register(self, record: MemberRecord) -> bool:
        """Register, update or renew. False: a newer life of this id is registered, so the caller is over."""

    async def remove(self, member_id: str, epoch: int) -> None:
        """Remove the member in this life or an earlier one; that life cannot register again."""

    async def view(self, after_version: int, timeout_s: float) -> RosterView:
        """Return the view, at once when newer than `after_version`, else when it changes or after
        `timeout_s`."""


class ScalingRoster(RosterClient, Protocol):
    """The view that the scaler and the commands have of the roster."""

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
        """Register the member; False when the record's epoch is over: a newer one is registered, or this one
        was removed."""
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
        """Remove the member; True when it was registered with this epoch or an earlier one."""
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
        """Take back the memory of an earlier life of the roster."""
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
        """Restore the orders that an earlier life of the roster had; return the view with them."""
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
    """Renew a registration until cancelled; return when the roster answers that this life is over."""
    while await register():
        await clock.sleep(renew_s)
