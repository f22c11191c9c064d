"""The roster in an actor of its own: `RosterActor` there, `RemoteRoster` in every other process, frames
between them, and how Ray names, starts and finds the actor."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from cluster.errors import RosterAwayError
from cluster.roster.messages import MemberRecord, RosterOrder, RosterView, StartingReplica
from cluster.roster.state import EXPIRE_S, REBUILD_S, RENEW_S, LocalRoster
from kvtransfer.codec import Codec
from kvtransfer.common.clock import Clock

# The time for which the reports of a starting replica are shown.
STARTING_S = 5.0


class RosterActor:
    """The content of the roster's actor: `LocalRoster` behind frames.

    A restarted actor shows its view only after `REBUILD_S`, when every living member has registered again;
    until then `view` answers version 0, which watchers ignore.
    """

    def __init__(self, clock: Clock, *, restarted: bool) -> None:
        first_version = int(clock.wall() * 1000)
        self._clock = clock
        self._roster = LocalRoster(clock, first_version=first_version, expire_s=EXPIRE_S)
        # Reports by replica, with their times.
        self._starting: dict[str, tuple[StartingReplica, float]] = {}
        self._complete_at = clock.now() + (REBUILD_S if restarted else 0.0)

    async def register(self, frame: bytes) -> bool:
        return await self._roster.register(_MEMBER_CODEC.decode(frame))

    async def remove(self, member_id: str, epoch: int) -> None:
        await self._roster.remove(member_id, epoch)

    async def change(self, frame: bytes) -> None:
        await self._roster.change(_ORDER_CODEC.decode(frame))

    async def restore(self, frame: bytes) -> bytes:
        return VIEW_CODEC.encode(await self._roster.restore(VIEW_CODEC.decode(frame)))

    async def tell_start(self, frame: bytes) -> None:
        starting = STARTING_CODEC.decode(frame)
        self._starting[starting.replica_id] = starting, self._clock.now()

    async def starting(self) -> list[bytes]:
        """Return the replicas that have recently reported how they start."""
        since = self._clock.now() - STARTING_S
        self._starting = {name: told for name, told in self._starting.items() if told[1] >= since}
        return [STARTING_CODEC.encode(starting) for starting, _ in self._starting.values()]

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

    async def register(self, record: MemberRecord) -> bool:
        try:
            return bool(await self._call("register", _MEMBER_CODEC.encode(record)))
        except RosterAwayError:
            return True

    async def remove(self, member_id: str, epoch: int) -> None:
        with contextlib.suppress(RosterAwayError):
            await self._call("remove", member_id, epoch)

    async def change(self, order: RosterOrder) -> None:
        await self._call("change", _ORDER_CODEC.encode(order))

    async def tell_start(self, starting: StartingReplica) -> None:
        """Show for `STARTING_S` how far a replica is that cannot serve yet."""
        with contextlib.suppress(RosterAwayError, AttributeError):  # that of a roster of an earlier version
            await self._call("tell_start", STARTING_CODEC.encode(starting))

    async def view(self, after_version: int, timeout_s: float) -> RosterView:
        """Return the roster's view; when the actor is away or rebuilding, the last view, after a wait, so
        that callers do not spin."""
        if self._last.version > after_version:
            after_version, timeout_s = self._last.version, 0.0
        try:
            view = _as_view(await self._call("view", after_version, timeout_s))
            is_new_life = view.version > self._last.version > 0 and view.incarnation != self._last.incarnation
            if is_new_life and self._restores:
                # The restarted roster has lost its orders; nobody shall act on that.
                view = _as_view(await self._call("restore", VIEW_CODEC.encode(self._last)))
        except RosterAwayError:
            await self._clock.sleep(min(timeout_s, RENEW_S))
            return self._last
        if view.version > self._last.version:
            self._last = view
        return self._last


def _as_view(frame: object) -> RosterView:
    assert isinstance(frame, bytes)
    return VIEW_CODEC.decode(frame)


_MEMBER_CODEC: Codec[MemberRecord] = Codec(MemberRecord)
_ORDER_CODEC: Codec[RosterOrder] = Codec(RosterOrder)
STARTING_CODEC: Codec[StartingReplica] = Codec(StartingReplica)
VIEW_CODEC: Codec[RosterView] = Codec(RosterView)
