"""What `tandem scale` does: plan, pull the lever, release, wait."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console

from cluster.client import Client
from cluster.commands.display import progress_line, stages
from cluster.commands.scale_plan import (
    ScalePlan,
    check_decodes,
    parse_orders,
    plan_json,
    plan_scale,
    plan_view,
)
from cluster.commands.terminal import err
from cluster.errors import CallError, DashboardError, PinError, ScaleTimeoutError, UnknownPoolError
from cluster.proto import tandem_pb2 as pb
from cluster.scaling.lever import AppTargets, Lever
from cluster.scaling.room import read_room
from kvtransfer.clock import Clock

_POLL_S = 0.5
_ANSWER_S = 10.0


class Door(NamedTuple):
    """How the cluster is reached: a gateway, and the dashboard with its token."""

    gateway: str
    dashboard: str
    token: str
    app: str

    def lever(self) -> Lever:
        return Lever(self.dashboard, self.app, self.token)


class ScaleWork:
    """One call of the command."""

    def __init__(self, door: Door, console: Console, clock: Clock, *, as_json: bool) -> None:
        self._door = door
        self._console = console
        self._clock = clock
        self._as_json = as_json

    async def scale(
        self, texts: Sequence[str], released: Sequence[str], *, dry_run: bool, wait_s: float | None
    ) -> None:
        orders = parse_orders(texts)
        status = await self._status()
        if status is not None:
            check_decodes({pool.name: pool.desired for pool in status.pools}, status, orders)
        async with self._door.lever() as lever:
            targets = await _application(lever, self._door.app)
            room = await read_room(lever, self._door.app) if orders else None
            plan = plan_scale(targets, status, room, orders, released)
            if not dry_run:
                await self._pull(plan, lever)
                await self._tell_roster(plan)
            if not self._as_json:
                self._console.print(plan_view(plan))
            if not dry_run and wait_s is not None and orders:
                await self._wait(orders, lever, wait_s)
        if self._as_json:
            print(json.dumps({"dry_run": dry_run, **plan_json(plan)}))
        elif dry_run:
            self._console.print("nothing was changed: a dry run")

    async def _pull(self, plan: ScalePlan, lever: Lever) -> None:
        done: list[str] = []
        for change in plan.changes:
            if change.is_pin:
                continue
            try:
                await lever.scale(change.pool, change.after)
            except DashboardError as error:
                if not done:
                    raise
                raise DashboardError(f"{', '.join(done)} was ordered, {change.pool} not: {error}") from error
            done.append(f"{change.pool}={change.after}")

    async def _tell_roster(self, plan: ScalePlan) -> None:
        """What Serve has no words for, through a gateway's console; that asks the dashboard whether the token
        is good."""
        if plan.released and not plan.consoles:
            raise PinError(
                f"no console of a gateway is known at {self._door.gateway}, and those unpin pools: "
                "set gateway.console_port"
            )
        pins = [change for change in plan.changes if change.is_pin and plan.consoles]
        for change in pins:
            order = {"pool": change.pool, "replicas": change.after}
            await self._post(plan, "scale", order, f"pool {change.pool} was not pinned")
        for pool in plan.released:
            await self._post(plan, "release", {"pool": pool}, f"pool {pool} was not released")

    async def _post(self, plan: ScalePlan, what: str, order: dict[str, Any], failure: str) -> None:
        headers = {"Authorization": f"Bearer {self._door.token}"} if self._door.token else {}
        limit = aiohttp.ClientTimeout(total=_ANSWER_S)
        console = plan.consoles[0]
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=headers) as session,
                session.post(f"http://{console}/console/api/{what}", json=order) as reply,
            ):
                told = await reply.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PinError(f"the console at {console} cannot be reached: {error!r}") from error
        if reply.status != 200:
            raise PinError(f"{failure}: {told}")

    async def _wait(self, orders: dict[str, int], lever: Lever, wait_s: float) -> None:
        """Until Serve runs as many, and none more is on its way in or out."""
        deadline = self._clock.now() + wait_s
        with stages(err, "waiting") as tell:
            while True:
                # A dashboard that moves or restarts meanwhile is waited for.
                with contextlib.suppress(DashboardError):
                    targets = await _application(lever, self._door.app)
                    pools = {pool: targets.pools[pool] for pool in orders if pool in targets.pools}
                    ready = {pool: (seen.num_running, orders[pool]) for pool, seen in pools.items()}
                    tell(progress_line("waiting", ready))
                    if all(seen.states == _only_running(orders[pool]) for pool, seen in pools.items()):
                        return
                    if overruled := [pool for pool, seen in pools.items() if seen.target != orders[pool]]:
                        raise ScaleTimeoutError(f"somebody ordered another count of {overruled[0]} meanwhile")
                if self._clock.now() >= deadline:
                    raise ScaleTimeoutError(
                        f"not reached within {wait_s:g} s, and goes on: `tandem status` shows how far it is"
                    )
                await self._clock.sleep(_POLL_S)

    async def _status(self) -> pb.StatusResponse | None:
        """None when no gateway answers: the lever does without."""
        try:
            async with Client(self._door.gateway) as client:
                return await client.status()
        except CallError:
            return None


async def _application(lever: Lever, app: str) -> AppTargets:
    targets = await lever.application()
    if targets is None:
        raise UnknownPoolError(f"Ray Serve at {lever.url} has no application {app!r}; --app names another")
    return targets


def _only_running(num_replicas: int) -> dict[str, int]:
    return {"RUNNING": num_replicas} if num_replicas else {}
