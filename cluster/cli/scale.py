"""`tandem scale decode=3`: order counts from Ray Serve, show what changes, wait until it has."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import aiohttp
import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from cluster.api.admin_client import AdminClient
from cluster.api.channel import ClientCredentials
from cluster.cli.credentials import ApiKey, ApiKeyFile, ClientCertificate, credentials
from cluster.cli.terminal import (
    DEFAULT_ADMIN_ADDRESS,
    NONE,
    AdminAddress,
    AsJson,
    err,
    made_table,
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
from cluster.proto import tandem_pb2 as pb
from cluster.scaling.headroom import Headroom, add_up, amount_text, read_headroom
from cluster.scaling.serve_client import AppTargets, ServeClient
from kvtransfer.common.clock import Clock, SystemClock

DEFAULT_DASHBOARD = "http://127.0.0.1:8265"
DEFAULT_APP = "tandem"
_SCHEMES = ("http://", "https://")
_DEFAULT_TOKEN_FILE = Path("~/.ray/auth_token")

Dashboard = Annotated[
    str,
    typer.Option(
        envvar="RAY_DASHBOARD_ADDRESS",
        help="URL of Ray's dashboard, as `tandem serve` prints it; default: RAY_ADDRESS where that is one, "
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
    admin_address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    api_key: ApiKey = "",
    api_key_file: ApiKeyFile = None,
    client_certificate: ClientCertificate = None,
    dashboard: Dashboard = "",
    ray_address: RayAddress = "",
    app: App = DEFAULT_APP,
    token_file: TokenFile = None,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Set how many replicas pools have; the counts hold over deploys and restarts."""
    if not orders and not release:
        raise typer.BadParameter("name a pool and its count, as in decode=3", param_hint="POOL=REPLICAS")

    target = ScaleTarget(
        admin_address,
        dashboard_url(dashboard, ray_address),
        read_token(token, token_file),
        app,
        credentials(api_key, api_key_file, client_certificate),
    )
    work = ScaleWork(target, out, SystemClock(), as_json=as_json)
    run(work.scale(orders or (), release or (), dry_run=dry_run, wait_s=timeout if wait else None))


def dashboard_url(given: str, ray_address: str) -> str:
    """Choose the dashboard's URL; `ray_address` counts only where it is one. `ConfigError` where `given` is
    none."""
    if given and not given.startswith(_SCHEMES):
        raise ConfigError(f"--dashboard: {given!r} is no URL; give http:// with the host and the port")
    return given or (ray_address if ray_address.startswith(_SCHEMES) else DEFAULT_DASHBOARD)


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
# What `tandem scale` does: plan, order, release, wait.

_POLL_S = 0.5
_ANSWER_S = 10.0


class ScaleTarget(NamedTuple):
    """Represents the application to scale: a gateway's address for operators, and the dashboard with its
    token."""

    gateway: str
    dashboard: str
    token: str
    app: str
    # Of the gateway's caller.
    who: ClientCredentials | None = None

    def open(self) -> ServeClient:
        """Return a client of Serve's scale API."""
        return ServeClient(self.dashboard, self.app, self.token)


class ScaleWork:
    """Carries out one call of the command."""

    def __init__(self, target: ScaleTarget, console: Console, clock: Clock, *, as_json: bool) -> None:
        self._target = target
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
        async with self._target.open() as client:
            targets = await _application(client, self._target.app)
            headroom = await read_headroom(client, self._target.app) if orders else None
            plan = plan_scale(targets, status, headroom, orders, released)
            if not dry_run:
                await self._order(plan, client)
                await self._update_roster(plan)
            if not self._as_json:
                self._console.print(plan_view(plan))
            if not dry_run and wait_s is not None and orders:
                await self._wait(orders, client, wait_s)
        if self._as_json:
            print(json.dumps({"dry_run": dry_run, **plan_json(plan)}))
        elif dry_run:
            self._console.print("nothing was changed: a dry run")

    async def _order(self, plan: ScalePlan, client: ServeClient) -> None:
        done: list[str] = []
        for change in plan.changes:
            if change.is_pin:
                continue
            try:
                await client.scale(change.pool, change.after)
            except DashboardError as error:
                if not done:
                    raise
                raise DashboardError(f"{', '.join(done)} was ordered, {change.pool} not: {error}") from error
            done.append(f"{change.pool}={change.after}")

    async def _update_roster(self, plan: ScalePlan) -> None:
        """Pin and release pools, which Serve cannot, through a gateway's console. The console checks the
        token with the dashboard."""
        if plan.released and not plan.consoles:
            raise PinError(
                f"no console of a gateway is known at {self._target.gateway}, and those unpin pools: "
                "set gateway.console_port"
            )
        pins = [change for change in plan.changes if change.is_pin and plan.consoles]
        for change in pins:
            order = {"pool": change.pool, "replicas": change.after}
            await self._post(plan, "scale", order, f"pool {change.pool} was not pinned")
        for pool in plan.released:
            await self._post(plan, "release", {"pool": pool}, f"pool {pool} was not released")

    async def _post(self, plan: ScalePlan, what: str, order: dict[str, Any], failure: str) -> None:
        headers = {"Authorization": f"Bearer {self._target.token}"} if self._target.token else {}
        limit = aiohttp.ClientTimeout(total=_ANSWER_S)
        console = plan.consoles[0]
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=headers) as session,
                session.post(f"http://{console}/console/api/{what}", json=order) as reply,
            ):
                text = await reply.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PinError(f"the console at {console} cannot be reached: {error!r}") from error
        if reply.status != 200:
            raise PinError(f"{failure}: {text}")

    async def _wait(self, orders: dict[str, int], client: ServeClient, wait_s: float) -> None:
        """Return when Serve runs as many, and no replica starts or stops."""
        deadline = self._clock.now() + wait_s
        running = {pool: {"RUNNING": num} if num else {} for pool, num in orders.items()}
        with stages(err, "waiting") as report:
            while True:
                # The dashboard may move or restart meanwhile.
                with contextlib.suppress(DashboardError):
                    targets = await _application(client, self._target.app)
                    pools = {pool: targets.pools[pool] for pool in orders if pool in targets.pools}
                    ready = {pool: (seen.num_running, orders[pool]) for pool, seen in pools.items()}
                    report(progress_line("waiting", ready))
                    if all(seen.states == running[pool] for pool, seen in pools.items()):
                        return
                    if overruled := [pool for pool, seen in pools.items() if seen.target != orders[pool]]:
                        raise ScaleTimeoutError(f"somebody ordered another count of {overruled[0]} meanwhile")
                if self._clock.now() >= deadline:
                    raise ScaleTimeoutError(
                        f"not reached within {wait_s:g} s; Serve continues (`tandem status` shows how far)"
                    )
                await self._clock.sleep(_POLL_S)

    async def _status(self) -> pb.StatusResponse | None:
        """Return None when no gateway answers: Serve scales without one."""
        try:
            async with AdminClient(self._target.gateway, credentials=self._target.who) as client:
                return await client.status()
        except CallError:
            return None


async def _application(client: ServeClient, app: str) -> AppTargets:
    targets = await client.application()
    if targets is None:
        raise UnknownPoolError(f"Ray Serve at {client.url} has no application {app!r}; --app names another")
    return targets


# ----------------------------------------------------------------------------------------------
# The plan: what `tandem scale` will change, from what Serve, a gateway and Ray report. No I/O.


class AffectedPool(NamedTuple):
    """Represents one order. `least` and `most` bound the running requests of the replicas that leave, because
    Ray Serve chooses which do; None: no gateway answered."""

    pool: str
    role: str
    before: int
    after: int
    num_running: int
    least: int | None
    most: int | None

    @property
    def num_added(self) -> int:
        return max(0, self.after - self.before)

    @property
    def is_pin(self) -> bool:
        """Whether Serve has this target already, so that only the roster can keep it."""
        return self.before == self.after


class ScalePlan(NamedTuple):
    """Represents all changes of one command. `shortages` says why added replicas cannot be placed now."""

    changes: tuple[AffectedPool, ...]
    released: tuple[str, ...]
    # Replicas that play another pool's role and return to their own first.
    recalled: tuple[str, ...]
    shortages: tuple[str, ...]
    headroom: Headroom | None
    # Of the gateways: pools are pinned and released through them.
    consoles: tuple[str, ...]
    has_status: bool


def parse_orders(texts: Sequence[str]) -> dict[str, int]:
    """Parse `decode=3 prefill=2`; `ConfigError` names the text that has another form."""
    orders: dict[str, int] = {}
    for text in texts:
        pool, _, count = text.partition("=")
        if not pool or not count.isdecimal():
            raise ConfigError(f"{text!r}: expected POOL=REPLICAS, as in decode=3")
        if pool in orders:
            raise ConfigError(f"pool {pool} is ordered twice")
        orders[pool] = int(count)
    return orders


def plan_scale(
    targets: AppTargets,
    status: pb.StatusResponse | None,
    headroom: Headroom | None,
    orders: Mapping[str, int],
    released: Collection[str],
) -> ScalePlan:
    """Plan the orders; `ConfigError` names an unknown pool, or an order that leaves no pool that decodes."""
    for pool in (*orders, *released):
        if pool not in targets.pools:
            raise ConfigError(f"there is no pool {pool!r}, but {', '.join(sorted(targets.pools))}")
    if status is not None:
        check_decodes({name: pool.target for name, pool in targets.pools.items()}, status, orders)
    changes = tuple(_change(pool, after, targets, status) for pool, after in orders.items())
    has_change = any(not change.is_pin for change in changes)
    return ScalePlan(
        changes=changes,
        released=tuple(released),
        recalled=tuple(
            replica.replica_id
            for replica in (status.replicas if status is not None and has_change else ())
            if replica.home_role not in ("", replica.role)
        ),
        shortages=tuple(headroom.shortages({it.pool: it.num_added for it in changes}) if headroom else ()),
        headroom=headroom,
        consoles=tuple(it.console for it in status.gateways if it.console) if status is not None else (),
        has_status=status is not None,
    )


def plan_view(plan: ScalePlan) -> Group:
    """Render the plan as tables and lines."""
    parts: list[RenderableType] = []
    if plan.changes:
        table = made_table("replicas", "pool", numbers=("running", "target", "wanted", "affected\nrequests"))
        for it in plan.changes:
            table.add_row(it.pool, str(it.num_running), str(it.before), str(it.after), _affected(it))
        parts.append(table)
        parts += [Text(line) for line in _notes(plan)]
    parts += [Text(f"{pool} is released: the autoscaler may move it again") for pool in plan.released]
    return Group(*parts)


def plan_json(plan: ScalePlan) -> dict[str, Any]:
    """Return the plan as one JSON object."""
    return {
        "pools": [
            {
                "name": it.pool,
                "before": it.before,
                "after": it.after,
                "num_running": it.num_running,
                "num_moving_least": it.least,
                "num_moving_most": it.most,
                "needed": plan.headroom.needed(it.pool, it.num_added) if plan.headroom else None,
            }
            for it in plan.changes
        ],
        "released": list(plan.released),
        "recalled": list(plan.recalled),
        "shortages": list(plan.shortages),
        "free": _free(plan.headroom) if plan.headroom else None,
    }


def check_decodes(counts: Mapping[str, int], status: pb.StatusResponse, orders: Mapping[str, int]) -> None:
    """Raise `ConfigError` where pools with these counts, changed by `orders`, have no replica that
    decodes."""
    if not any(count == 0 for count in orders.values()):
        return
    decoding = {pool.name for pool in status.pools if pool.role != "prefill"}
    if not any(orders.get(pool, counts[pool]) for pool in decoding & counts.keys()):
        raise ConfigError("no pool that decodes would have a replica: keep one in at least one of them")


def _change(pool: str, after: int, targets: AppTargets, status: pb.StatusResponse | None) -> AffectedPool:
    seen = targets.pools[pool]
    least = most = None
    role = ""
    if status is not None:
        role = next((it.role for it in status.pools if it.name == pool), "")
        loads = sorted(
            replica.load.num_running + replica.load.num_waiting
            for replica in status.replicas
            if replica.pool == pool and replica.state == "ready"
        )
        num_leaving = max(0, len(loads) - after)
        least, most = sum(loads[:num_leaving]), sum(loads[len(loads) - num_leaving :])
    return AffectedPool(pool, role, seen.target, after, seen.num_running, least, most)


def _affected(change: AffectedPool) -> str:
    if change.least is None or change.after >= change.num_running:
        return NONE
    return str(change.most) if change.least == change.most else f"{change.least} to {change.most}"


def _notes(plan: ScalePlan) -> list[str]:
    lines = []
    for it in plan.changes:
        if it.is_pin and plan.consoles:
            lines.append(f"{it.pool} has this target already, and is pinned to it")
        elif it.is_pin:
            lines.append(
                f"{it.pool} has this target already: without a gateway's console it cannot be pinned"
            )
        elif it.after < it.before:
            fate = (
                "finish there or start at another replica"
                if it.role == "prefill"
                else "move to other replicas"
            )
            lines.append(f"{it.pool}: requests of the replicas that leave {fate}")
    lines += [f"{replica} plays another role and is recalled first" for replica in plan.recalled]
    if not plan.has_status:
        lines.append("no gateway answers: what runs on the replicas is not known")
    if any(it.num_added for it in plan.changes):
        lines += _headroom_lines(plan)
    return lines


def _headroom_lines(plan: ScalePlan) -> list[str]:
    if plan.headroom is None:
        return ["what the Ray cluster has free is not known"]
    needed = add_up(plan.headroom.needed(it.pool, it.num_added) for it in plan.changes)
    lines = [
        f"{name}: {amount_text(amount)} needed, {amount_text(plan.headroom.total_free(name))} free"
        for name, amount in sorted(needed.items())
    ]
    lines += [
        f"{it.pool} has no replica now, so what one takes is not known"
        for it in plan.changes
        if it.num_added and it.pool not in plan.headroom.bundles
    ]
    return lines + [f"does not fit now: {line}" for line in plan.shortages]


def _free(headroom: Headroom) -> dict[str, float]:
    return {
        name: headroom.total_free(name) for name in sorted({name for node in headroom.total for name in node})
    }
