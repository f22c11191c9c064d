"""`tandem scale decode=3`: order counts, show what changes, wait until it has.

tandem scale --Admin.Scale--> gateway --> scaler --> Ray Serve
             --dashboard URL--------------------->   Ray Serve's scale endpoint, with a Ray token
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console

from cluster.api.admin_client import AdminClient
from cluster.api.replies import scale_reply
from cluster.cli.gateway_options import AdminOptions, gateway_options
from cluster.cli.scale_plan import parse_orders, plan_json, plan_scale, plan_view
from cluster.cli.terminal import (
    AsJson,
    err,
    out,
    progress_line,
    run,
    stages,
)
from cluster.errors import (
    CallError,
    ConfigError,
    DashboardError,
    PinError,
    ScaleTimeoutError,
    UnknownPoolError,
)
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.scaling.orders import plan_order
from cluster.scaling.serve_client import ServeClient
from cluster.serve.serve_runs import living_runs
from kvtransfer.common.clock import Clock, SystemClock

DEFAULT_APP = "tandem"
_SCHEMES = ("http://", "https://")
_DEFAULT_TOKEN_FILE = Path("~/.ray/auth_token")

Dashboard = Annotated[
    str,
    typer.Option(
        help="URL of Ray's dashboard: order from Ray Serve itself, with a Ray token, if no gateway answers."
    ),
]
App = Annotated[str, typer.Option(help="With --dashboard: the application.")]
Token = Annotated[str, typer.Option(envvar="RAY_AUTH_TOKEN", hidden=True, show_envvar=False)]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="RAY_AUTH_TOKEN_PATH",
        help="With --dashboard: holds the Ray token, unless it is that of your own `tandem serve`; "
        "RAY_AUTH_TOKEN goes first.",
    ),
]


@gateway_options
def scale(
    orders: Annotated[list[str] | None, typer.Argument(metavar="POOL=REPLICAS")] = None,
    release: Annotated[
        list[str] | None, typer.Option(help="Let the autoscaler move this pool again; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until the counts are reached.")] = True,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait.")] = 600.0,
    dashboard: Dashboard = "",
    app: App = DEFAULT_APP,
    token_file: TokenFile = None,
    token: Token = "",
    as_json: AsJson = False,
    *,
    to: AdminOptions,
) -> None:
    """Set how many replicas pools have; the counts hold over deploys and restarts."""
    if not orders and not release:
        raise typer.BadParameter("name a pool and its count, as in decode=3", param_hint="POOL=REPLICAS")
    if dashboard and not dashboard.startswith(_SCHEMES):
        raise ConfigError(f"--dashboard: {dashboard!r} is no URL; give http:// with the host and the port")

    async def order() -> None:
        counts = parse_orders(orders or ())
        limit_s = timeout if wait else None
        if dashboard:
            file = token_file or _token_file_of(dashboard)
            async with ServeClient(dashboard, app, read_token(token, file)) as client:
                work = ScaleWork(DashboardTarget(client, app), out, SystemClock(), as_json=as_json)
                await work.scale(counts, release or (), dry_run=dry_run, wait_s=limit_s)
        else:
            async with AdminClient(to.admin_address, credentials=to.credentials()) as admin:
                work = ScaleWork(GatewayTarget(admin), out, SystemClock(), as_json=as_json)
                await work.scale(counts, release or (), dry_run=dry_run, wait_s=limit_s)

    run(order())


def _token_file_of(dashboard: str) -> Path | None:
    """Return the token's file of the `tandem serve` of this user that has this dashboard."""
    files = [run.token_file for run in living_runs() if run.dashboard == dashboard.rstrip("/")]
    return Path(files[0]) if files and files[0] else None


def read_token(token: str, file: Path | None) -> str:
    """Find the Ray token as Ray does: the token itself, else the named file, else Ray's own; "": there is
    none."""
    if token:
        return token.strip()
    try:
        return (file or _DEFAULT_TOKEN_FILE).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        if file is not None:
            raise ConfigError(f"the Ray token cannot be read from {file}: {error}") from error
        return ""


# ----------------------------------------------------------------------------------------------
# Who takes the orders.


class ScaleTarget(Protocol):
    """Takes orders for the pools of one application."""

    async def scale(self, counts: Mapping[str, int], *, dry_run: bool) -> admin_pb.ScaleResponse:
        """Order the counts, or only say what that would change; of all pools where none is named."""

    async def release(self, pools: Sequence[str]) -> None:
        """Let the autoscaler change these pools again."""

    async def status(self) -> admin_pb.StatusResponse | None:
        """Return what runs on the replicas; None: not known."""


class GatewayTarget:
    """A gateway, which passes the orders on under the name of who gives them."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client

    async def scale(self, counts: Mapping[str, int], *, dry_run: bool) -> admin_pb.ScaleResponse:
        return await self._client.scale(counts, dry_run=dry_run)

    async def release(self, pools: Sequence[str]) -> None:
        await self._client.release(pools)

    async def status(self) -> admin_pb.StatusResponse | None:
        return await self._client.status()


class DashboardTarget:
    """Ray Serve itself. The scaler, if one runs, takes its targets for orders of an unnamed operator."""

    def __init__(self, client: ServeClient, app: str) -> None:
        self._client = client
        self._app = app

    async def scale(self, counts: Mapping[str, int], *, dry_run: bool) -> admin_pb.ScaleResponse:
        seen = await self._client.application()
        if seen is None:
            problem = f"has no application {self._app!r}; --app names another"
            raise UnknownPoolError(f"Ray Serve at {self._client.url} {problem}")
        done = await plan_order(self._client, self._app, seen, counts)
        ordered: list[str] = []
        for change in () if dry_run else done.changes:
            if change.is_pin:
                continue
            try:
                await self._client.scale(change.pool, change.after)
            except DashboardError as error:
                if not ordered:
                    raise
                names = ", ".join(ordered)
                raise DashboardError(f"{names} was ordered, {change.pool} not: {error}") from error
            ordered.append(f"{change.pool}={change.after}")
        return scale_reply(done)

    async def release(self, pools: Sequence[str]) -> None:
        raise PinError("Ray Serve knows no pins: pools are released through a gateway, without --dashboard")

    async def status(self) -> admin_pb.StatusResponse | None:
        return None


# ----------------------------------------------------------------------------------------------
# What `tandem scale` does: order, release, wait.

_POLL_S = 0.5


class ScaleWork:
    """Carries out one call of the command."""

    def __init__(self, target: ScaleTarget, console: Console, clock: Clock, *, as_json: bool) -> None:
        self._target = target
        self._console = console
        self._clock = clock
        self._as_json = as_json

    async def scale(
        self, counts: Mapping[str, int], released: Sequence[str], *, dry_run: bool, wait_s: float | None
    ) -> None:
        status = await self._target.status()
        reply = await self._target.scale(counts, dry_run=dry_run) if counts else admin_pb.ScaleResponse()
        if released and not dry_run:
            await self._target.release(released)
        plan = plan_scale(reply, status, released)
        if not self._as_json:
            self._console.print(plan_view(plan))
        if not dry_run and wait_s is not None and counts:
            await self._wait(counts, wait_s)
        if self._as_json:
            print(json.dumps({"dry_run": dry_run, **plan_json(plan)}))
        elif dry_run:
            self._console.print("nothing was changed: a dry run")

    async def _wait(self, counts: Mapping[str, int], wait_s: float) -> None:
        """Return when Serve runs as many, and no replica starts or stops."""
        deadline = self._clock.now() + wait_s
        running = {pool: {"RUNNING": num} if num else {} for pool, num in counts.items()}
        with stages(err, "waiting") as report:
            while True:
                # The dashboard, or this gateway, may move or restart meanwhile.
                with contextlib.suppress(DashboardError, CallError):
                    reply = await self._target.scale({}, dry_run=True)
                    pools = {seen.name: seen for seen in reply.pools if seen.name in counts}
                    ready = {pool: (seen.num_running, counts[pool]) for pool, seen in pools.items()}
                    report(progress_line("waiting", ready))
                    if all(dict(seen.states) == running[pool] for pool, seen in pools.items()):
                        return
                    if overruled := [pool for pool, seen in pools.items() if seen.before != counts[pool]]:
                        raise ScaleTimeoutError(f"somebody ordered another count of {overruled[0]} meanwhile")
                if self._clock.now() >= deadline:
                    raise ScaleTimeoutError(
                        f"not reached within {wait_s:g} s; Serve continues (`tandem status` shows how far)"
                    )
                await self._clock.sleep(_POLL_S)
