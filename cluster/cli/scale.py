"""`tandem scale decode=3`: pull the lever that Ray Serve has for it, say what changes, wait until it has."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import aiohttp
import typer
from rich.console import Console

from cluster.api.client import Client
from cluster.cli.display import progress_line, stages
from cluster.cli.scale_plan import (
    ScalePlan,
    check_decodes,
    parse_orders,
    plan_json,
    plan_scale,
    plan_view,
)
from cluster.cli.terminal import DEFAULT_ADDRESS, Address, AsJson, err, out, run
from cluster.errors import (
    CallError,
    ConfigError,
    DashboardError,
    PinError,
    ScaleTimeoutError,
    UnknownPoolError,
)
from cluster.proto import tandem_pb2 as pb
from cluster.scaling.serve_client import AppTargets, ServeClient
from cluster.serve.capacity import read_room
from kvtransfer.common.clock import Clock, SystemClock

DEFAULT_DASHBOARD = "http://127.0.0.1:8265"
DEFAULT_APP = "tandem"
_SCHEMES = ("http://", "https://")
_DEFAULT_TOKEN_FILE = Path("~/.ray/auth_token")

Dashboard = Annotated[
    str,
    typer.Option(
        envvar="RAY_DASHBOARD_ADDRESS",
        help="URL of Ray's dashboard, which `tandem serve` tells; default: RAY_ADDRESS where that is one, "
        "else http://127.0.0.1:8265.",
    ),
]
RayAddress = Annotated[str, typer.Option(envvar="RAY_ADDRESS", hidden=True)]
App = Annotated[str, typer.Option(help="The application, where several share the Ray cluster.")]
Token = Annotated[str, typer.Option(envvar="RAY_AUTH_TOKEN", hidden=True, show_envvar=False)]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="RAY_AUTH_TOKEN_PATH", help="Holds the Ray token; RAY_AUTH_TOKEN goes first."),
]


def scale(
    orders: Annotated[list[str] | None, typer.Argument(metavar="POOL=REPLICAS")] = None,
    release: Annotated[
        list[str] | None, typer.Option(help="Let the autoscaler move this pool again; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until the counts are reached.")] = True,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait.")] = 600.0,
    address: Address = DEFAULT_ADDRESS,
    dashboard: Dashboard = "",
    ray_address: RayAddress = "",
    app: App = DEFAULT_APP,
    token_file: TokenFile = None,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Set how many replicas pools have; it stays so, over deploys and restarts, until somebody changes it."""
    if not orders and not release:
        raise typer.BadParameter("name a pool and its count, as in decode=3", param_hint="POOL=REPLICAS")

    door = ScaleTarget(address, dashboard_url(dashboard, ray_address), read_token(token, token_file), app)
    work = ScaleWork(door, out, SystemClock(), as_json=as_json)
    run(work.scale(orders or (), release or (), dry_run=dry_run, wait_s=timeout if wait else None))


def dashboard_url(given: str, ray_address: str) -> str:
    """`ray_address` may also be that of a Ray cluster, which says nothing here. `ConfigError` for no URL."""
    if given and not given.startswith(_SCHEMES):
        raise ConfigError(f"--dashboard: {given!r} is no URL; give http:// with the host and the port")
    return given or (ray_address if ray_address.startswith(_SCHEMES) else DEFAULT_DASHBOARD)


def read_token(token: str, file: Path | None) -> str:
    """As Ray looks for it: the token itself, else the named file, else Ray's own; "": there is none."""
    if token:
        return token.strip()
    try:
        return (file or _DEFAULT_TOKEN_FILE).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        if file is not None:
            raise ConfigError(f"the Ray token cannot be read from {file}: {error}") from error
        return ""


# ----------------------------------------------------------------------------------------------
# What `tandem scale` does: plan, pull the lever, release, wait.

_POLL_S = 0.5
_ANSWER_S = 10.0


class ScaleTarget(NamedTuple):
    """How the cluster is reached: a gateway, and the dashboard with its token."""

    gateway: str
    dashboard: str
    token: str
    app: str

    def lever(self) -> ServeClient:
        return ServeClient(self.dashboard, self.app, self.token)


class ScaleWork:
    """One call of the command."""

    def __init__(self, door: ScaleTarget, console: Console, clock: Clock, *, as_json: bool) -> None:
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

    async def _pull(self, plan: ScalePlan, lever: ServeClient) -> None:
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

    async def _wait(self, orders: dict[str, int], lever: ServeClient, wait_s: float) -> None:
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


async def _application(lever: ServeClient, app: str) -> AppTargets:
    targets = await lever.application()
    if targets is None:
        raise UnknownPoolError(f"Ray Serve at {lever.url} has no application {app!r}; --app names another")
    return targets


def _only_running(num_replicas: int) -> dict[str, int]:
    return {"RUNNING": num_replicas} if num_replicas else {}
