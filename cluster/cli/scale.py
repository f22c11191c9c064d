"""`tandem scale decode=3`: pull the lever that Ray Serve has for it, say what changes, wait until it has."""

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

from cluster.api.client import Client
from cluster.cli.terminal import (
    DEFAULT_ADDRESS,
    NONE,
    Address,
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
from cluster.scaling.serve_client import AppTargets, ServeClient
from cluster.serve.capacity import Room, read_room
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


# ----------------------------------------------------------------------------------------------
# What `tandem scale` will change, from what Serve, a gateway and Ray say now: figures and texts, no I/O.


class PoolChange(NamedTuple):
    """One order. `least` and `most` bound how many running requests the leaving replicas have: which of them
    leave is for Ray Serve to choose. None: no gateway answered."""

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
        """Serve has this target already: only the roster can be told to keep it."""
        return self.before == self.after


class ScalePlan(NamedTuple):
    """All of it. `shortages` says why added replicas cannot be placed now."""

    changes: tuple[PoolChange, ...]
    released: tuple[str, ...]
    # Replicas that play another pool's role and go home first.
    recalled: tuple[str, ...]
    shortages: tuple[str, ...]
    room: Room | None
    # Of gateways: through them pools are pinned at the count that they have, and released.
    consoles: tuple[str, ...]
    has_status: bool


def parse_orders(texts: Sequence[str]) -> dict[str, int]:
    """Of `decode=3 prefill=2`; `ConfigError` names the one that is not like that."""
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
    room: Room | None,
    orders: Mapping[str, int],
    released: Collection[str],
) -> ScalePlan:
    """`ConfigError` names a pool that there is not, or an order that would leave nothing to serve."""
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
        recalled=_lent(status) if status is not None and has_change else (),
        shortages=tuple(room.shortages({it.pool: it.num_added for it in changes}) if room else ()),
        room=room,
        consoles=tuple(it.console for it in status.gateways if it.console) if status is not None else (),
        has_status=status is not None,
    )


def plan_view(plan: ScalePlan) -> Group:
    """For people."""
    parts: list[RenderableType] = []
    if plan.changes:
        table = made_table("replicas", "pool", numbers=("running", "target", "wanted", "affected\nrequests"))
        for it in plan.changes:
            table.add_row(it.pool, str(it.num_running), str(it.before), str(it.after), _moving(it))
        parts.append(table)
        parts += [Text(line) for line in _notes(plan)]
    parts += [Text(f"{pool} is released: the autoscaler may move it again") for pool in plan.released]
    return Group(*parts)


def plan_json(plan: ScalePlan) -> dict[str, Any]:
    """For programs."""
    return {
        "pools": [
            {
                "name": it.pool,
                "before": it.before,
                "after": it.after,
                "num_running": it.num_running,
                "num_moving_least": it.least,
                "num_moving_most": it.most,
                "needed": plan.room.needed(it.pool, it.num_added) if plan.room else None,
            }
            for it in plan.changes
        ],
        "released": list(plan.released),
        "recalled": list(plan.recalled),
        "shortages": list(plan.shortages),
        "free": _free(plan.room) if plan.room else None,
    }


def check_decodes(counts: Mapping[str, int], status: pb.StatusResponse, orders: Mapping[str, int]) -> None:
    """`ConfigError` where pools with these counts, changed by `orders`, would have none that decodes."""
    if not any(count == 0 for count in orders.values()):
        return
    decoding = {pool.name for pool in status.pools if pool.role != "prefill"}
    if not any(orders.get(pool, counts[pool]) for pool in decoding & counts.keys()):
        raise ConfigError("no pool that decodes would have a replica: keep one in at least one of them")


def _change(pool: str, after: int, targets: AppTargets, status: pb.StatusResponse | None) -> PoolChange:
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
    return PoolChange(pool, role, seen.target, after, seen.num_running, least, most)


def _lent(status: pb.StatusResponse) -> tuple[str, ...]:
    return tuple(
        replica.replica_id
        for replica in status.replicas
        if replica.home_role and replica.home_role != replica.role
    )


def _moving(change: PoolChange) -> str:
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
            fate = "finish there or start elsewhere" if it.role == "prefill" else "move to other replicas"
            lines.append(f"{it.pool}: requests of the replicas that leave {fate}")
    lines += [f"{replica} plays another role and is recalled first" for replica in plan.recalled]
    if not plan.has_status:
        lines.append("no gateway answers: what runs on the replicas is not known")
    if any(it.num_added for it in plan.changes):
        lines += _room_lines(plan)
    return lines


def _room_lines(plan: ScalePlan) -> list[str]:
    if plan.room is None:
        return ["what the Ray cluster has free is not known"]
    needed: dict[str, float] = {}
    for it in plan.changes:
        for name, amount in plan.room.needed(it.pool, it.num_added).items():
            needed[name] = needed.get(name, 0.0) + amount
    lines = [
        f"{name}: {_number(amount)} needed, {_number(plan.room.total_free(name))} free"
        for name, amount in sorted(needed.items())
    ]
    lines += [
        f"{it.pool} has no replica now, so what one takes is not known"
        for it in plan.changes
        if it.num_added and it.pool not in plan.room.bundles
    ]
    return lines + [f"does not fit now: {line}" for line in plan.shortages]


def _free(room: Room) -> dict[str, float]:
    return {name: room.total_free(name) for name in sorted({name for node in room.total for name in node})}


def _number(amount: float) -> str:
    return f"{amount:.4f}".rstrip("0").rstrip(".")
