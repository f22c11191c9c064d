"""The roster in an actor of its own: `RosterActor` there, `RemoteRoster` in every other process, frames
between them, and how Ray names, starts and finds the actor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.errors import RosterAwayError
from cluster.roster.messages import MemberRecord, RosterOrder, RosterView, StartingReplica
from cluster.roster.state import EXPIRE_S, REBUILD_S, RENEW_S, LocalRoster
from kvtransfer.codec import Codec
from kvtransfer.common.clock import Clock, SystemClock

# Of all our named actors.
NAMESPACE = "tandem"
_CALL_S = 5.0
# How long what a replica tells while it starts is shown.
STARTING_S = 5.0
_AGAIN_S = 0.5


class RosterActor:
    """What runs in the roster's actor: `LocalRoster` behind frames.

    A restarted actor shows its view only after `REBUILD_S`, when every living member has registered again;
    until then `view` answers version 0, which watchers ignore.
    """

    def __init__(self, clock: Clock, *, restarted: bool) -> None:
        first_version = int(clock.wall() * 1000)
        self._clock = clock
        self._roster = LocalRoster(clock, first_version=first_version, expire_s=EXPIRE_S)
        # By replica: what it told, and when.
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
        """Return the replicas that have lately told what they start with."""
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
        """Show what a replica does that cannot serve yet, for `STARTING_S`."""
        with contextlib.suppress(RosterAwayError, AttributeError):  # that of a roster of an earlier version
            await self._call("tell_start", STARTING_CODEC.encode(starting))

    async def view(self, after_version: int, timeout_s: float) -> RosterView:
        """The last view when the actor is away or rebuilding, after a wait, so that callers do not spin."""
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


# ----------------------------------------------------------------------------------------------
# With Ray: the actor is named, detached and restarted by Ray; whoever misses it makes it again.


class RayRosterActor(RosterActor):
    """`RosterActor` as Ray makes it: after a restart, or in place of a lost one, it waits to be filled."""

    def __init__(self, replaces_another: bool) -> None:
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(SystemClock(), restarted=restarted or replaces_another)


def open_roster(app: str) -> RemoteRoster:
    """The application's roster, from any process of the Ray cluster; made when it does not exist."""
    return RemoteRoster(_RosterCall(app), SystemClock())


def find_roster(app: str) -> RemoteRoster:
    """As `open_roster`, of another application, which may not exist: its roster is neither made nor given
    the memory of an earlier one."""
    return RemoteRoster(_RosterCall(app, makes=False), SystemClock(), restores=False)


def start_roster(app: str) -> None:
    """Make the application's roster, before any member looks for it."""
    _roster_actor(app, replaces_another=False)


def stop_roster(app: str) -> None:
    """End the application's roster for good; its members must be gone."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(_roster_name(app), namespace=NAMESPACE), no_restart=True)


def read_roster(app: str) -> RosterView:
    """The roster's view now, for the process that started the application; empty when it is away."""
    try:
        actor = ray.get_actor(_roster_name(app), namespace=NAMESPACE)
        return VIEW_CODEC.decode(ray.get(actor.view.remote(0, 0.0), timeout=_CALL_S))
    except (RayError, ValueError):
        return RosterView(version=0)


def read_starting(app: str) -> list[StartingReplica]:
    """The replicas that start now, for the process that started the application; none when the roster is
    away."""
    try:
        actor = ray.get_actor(_roster_name(app), namespace=NAMESPACE)
        return [STARTING_CODEC.decode(frame) for frame in ray.get(actor.starting.remote(), timeout=_CALL_S)]
    except (RayError, ValueError):
        return []


def await_roster(app: str, wait_s: float) -> RosterView | None:
    """The roster's view; None where the application has no roster.

    A restarted roster is waited for until its watchers have given its orders back, and a new one until
    the scaler has looked once. After `wait_s` the view is taken as it is (`deploy_mark` is then "");
    `RosterAwayError` where there is none.
    """
    clock, pause = SystemClock(), threading.Event()
    give_up_at = clock.now() + wait_s
    problem = "it was restarted, and collects its members"
    last: RosterView | None = None
    while clock.now() < give_up_at:
        try:
            actor = ray.get_actor(_roster_name(app), namespace=NAMESPACE)
        except ValueError:
            return None
        try:
            view = VIEW_CODEC.decode(ray.get(actor.view.remote(0, _CALL_S), timeout=2 * _CALL_S))
            last = view if view.version > 0 else last
            if view.deploy_mark:
                return view
        except RayError as error:
            problem = repr(error)
        pause.wait(_AGAIN_S)
    if last is None:
        raise RosterAwayError(f"the roster of {app} does not answer: {problem}")
    return last


class _RosterCall:
    """Calls the roster's actor; any failure to reach it in time is `RosterAwayError`."""

    def __init__(self, app: str, *, makes: bool = True) -> None:
        self._app = app
        self._makes = makes
        self._actor: ActorHandle[RayRosterActor] | None = None

    async def __call__(self, method: str, *arguments: Any) -> object:
        timeout_s = _CALL_S + (float(arguments[1]) if method == "view" else 0.0)
        try:
            async with asyncio.timeout(timeout_s):
                if self._actor is None:
                    self._actor = await asyncio.to_thread(self._find)
                return await getattr(self._actor, method).remote(*arguments)
        except (RayError, TimeoutError, ValueError) as error:
            self._actor = None
            raise RosterAwayError(f"roster: {method}: {error!r}") from error

    def _find(self) -> ActorHandle[RayRosterActor]:
        if self._makes:
            return _roster_actor(self._app, replaces_another=True)
        actor: ActorHandle[RayRosterActor] = ray.get_actor(_roster_name(self._app), namespace=NAMESPACE)
        return actor


def _roster_actor(app: str, *, replaces_another: bool) -> ActorHandle[RayRosterActor]:
    make: Callable[..., ActorHandle[RayRosterActor]] = (
        ray.remote(RayRosterActor)
        .options(
            name=_roster_name(app),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
        )
        .remote
    )
    return make(replaces_another)


def _roster_name(app: str) -> str:
    return f"roster-{app}"
