"""`tandem scale decode=3`: order counts, show what changes, wait until it has.

tandem scale --Admin.Scale--> gateway --> scaler --> Ray Serve
             --dashboard URL--------------------->   Ray Serve's scale endpoint, with a Ray token
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.api.admin_client import AdminClient
from cluster.cli.gateway_options import AdminOptions, gateway_options
from cluster.cli.scale_plan import parse_orders
from cluster.cli.scale_target import DashboardTarget, GatewayTarget
from cluster.cli.scale_work import ScaleWork
from cluster.cli.terminal import AsJson, out, run
from cluster.errors import (
    ConfigError,
)
from cluster.scaling.serve_client import ServeClient
from cluster.serve.serve_runs import living_runs
from kvtransfer.common.clock import SystemClock

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
