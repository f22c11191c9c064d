"""`tandem serve`: the cluster, from a file or from options, until Ctrl-C."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.serve_options import ServeOptions, announced_config, config_yaml, serve_options
from cluster.cli.terminal import catch_signals, die, err, out, progress_line, stages
from cluster.config import LOOPBACK, ClusterConfig
from cluster.errors import StartError
from kvtransfer.common.clock import SystemClock

RayAddress = Annotated[str, typer.Option(help='"auto": join or start; "local": always start; or host:port.')]


@serve_options
def serve(
    file: Annotated[Path | None, typer.Option("-f", "--file", help="The cluster's YAML file.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration as a YAML file; start nothing.")
    ] = False,
    ray_address: RayAddress = "auto",
    *,
    given: ServeOptions,
) -> None:
    """Start the pools and the gateway, and serve until Ctrl-C.

    The options below describe the cluster without a file; beside one, they replace what it says.
    """
    interrupted = catch_signals()
    config = announced_config(file, given)
    if print_config:
        print(config_yaml(config), end="")
        return
    from cluster.serve.launcher import Service  # here: `--print-config` needs no Ray

    # The index server comes from the environment where the file names none.
    url = os.environ.pop("REDIS_URL", "")  # processes that are started here do not get it
    if url and not config.store.has_redis:
        config = config.with_redis_url(url)
    service = Service(config, SystemClock(), ray_address=ray_address)
    try:
        with stages(err, "starting") as report:
            addresses = service.start(
                lambda progress: report(progress_line(progress.stage, progress.ready)), interrupted
            )
        for name, place in (
            ("gateway", f"[bold]{', '.join(addresses.gateways)}[/]"),
            ("HTTP", ", ".join(addresses.http_urls) or "none"),
            ("admin", ", ".join(addresses.admins)),
            ("console", ", ".join(addresses.consoles) or "none"),
            ("callers", _callers(config)),
            ("Ray", addresses.ray),
            ("dashboard", addresses.dashboard or "none"),
            ("Ray token", _token_place()),
            ("logs", addresses.logs or "on the nodes of the Ray cluster"),
            ("dtype", service.dtype_reason),
            ("settings", str(file) if file else "of the options; --print-config prints them as a file"),
        ):
            out.print(f"{name:<10} {place}", soft_wrap=True)
        out.print("Ctrl-C stops everything.")
        service.wait(interrupted)
    except StartError as error:
        if interrupted.is_set():
            die(str(error), interrupted.status)
        raise
    finally:
        with stages(err, "stopping"):
            service.stop()
    out.print("stopped")


def _callers(config: ClusterConfig) -> str:
    """Say who may call."""
    if config.auth.mode == "required":
        return "authenticated"
    where = "other hosts too" if config.gateway.host not in LOOPBACK else "from this host alone"
    return f"not authenticated, {where}"


def _token_place() -> str:
    if "RAY_AUTH_TOKEN" in os.environ:
        return "in the environment variable RAY_AUTH_TOKEN"
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return "none: RAY_AUTH_MODE is disabled"
    return f"in {os.environ.get('RAY_AUTH_TOKEN_PATH') or Path.home() / '.ray' / 'auth_token'}"
