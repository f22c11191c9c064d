"""`tandem scale decode=3`: pull the lever that Ray Serve has for it, say what changes, wait until it has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.commands.terminal import DEFAULT_ADDRESS, Address, AsJson, out, run
from cluster.errors import ConfigError
from kvtransfer.clock import SystemClock

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
    from cluster.commands.scale_work import Door, ScaleWork  # here: only this command needs an HTTP client

    door = Door(address, dashboard_url(dashboard, ray_address), read_token(token, token_file), app)
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
