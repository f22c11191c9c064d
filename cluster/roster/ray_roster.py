"""Run the roster as a Ray actor: named, detached, restarted by Ray, and made again by any process that misses
it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.errors import RosterAwayError
from cluster.roster.actor import STARTING_CODEC, VIEW_CODEC, RemoteRoster, RosterActor
from cluster.roster.messages import RosterView, StartingReplica
from kvtransfer.common.clock import SystemClock

# The namespace of all our named actors.
NAMESPACE = "tandem"
_CALL_S = 5.0

_AGAIN_S = 0.5
# A place on the head node, which has this resource: pods of other nodes drain and end one after another, and
# would take the roster along.
AT_HEAD = {"node:__internal_head__": 0.001}


class RayRosterActor(RosterActor):
    """`RosterActor` as Ray makes it: after a restart, or in place of a lost one, it waits to be filled."""

    def __init__(self, replaces_another: bool) -> None:
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(SystemClock(), restarted=restarted or replaces_another)


def open_roster(app: str) -> RemoteRoster:
    """Return the application's roster, from any process of the Ray cluster; it is made when it does not
    exist."""
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
    """Return the roster's view now, for the process that started the application; empty when the roster is
    away."""
    try:
        actor = ray.get_actor(_roster_name(app), namespace=NAMESPACE)
        return VIEW_CODEC.decode(ray.get(actor.view.remote(0, 0.0), timeout=_CALL_S))
    except (RayError, ValueError):
        return RosterView(version=0)


def read_starting(app: str) -> list[StartingReplica]:
    """Return the replicas that start now, for the process that started the application; none when the roster
    is away."""
    try:
        actor = ray.get_actor(_roster_name(app), namespace=NAMESPACE)
        return [STARTING_CODEC.decode(frame) for frame in ray.get(actor.starting.remote(), timeout=_CALL_S)]
    except (RayError, ValueError):
        return []


def await_roster(app: str, wait_s: float) -> RosterView | None:
    """Wait for the roster's view, and return it; None where the application has no roster.

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
            resources=AT_HEAD,
        )
        .remote
    )
    return make(replaces_another)


def _roster_name(app: str) -> str:
    return f"roster-{app}"
