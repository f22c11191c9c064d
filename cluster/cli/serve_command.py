"""`tandem serve`: the cluster, from a file or from options, until Ctrl-C."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.model_download import fetched
from cluster.cli.progress_report import progress_to, stages
from cluster.cli.ray_choice import ray_choice
from cluster.cli.refusals import refuse_what_cannot_run
from cluster.cli.serve_options import (
    ServeOptions,
    announced_config,
    config_yaml,
    named_by_options,
    serve_options,
)
from cluster.cli.terminal import RayVariable, catch_signals, die, err, out
from cluster.config import LOOPBACK, ClusterConfig
from cluster.errors import StartError
from cluster.serve.machine import Machine
from cluster.shown_urls import HIDDEN
from kvtransfer.common.clock import SystemClock

_LOCAL = "local"
RayAddress = Annotated[
    str | None,
    typer.Option(
        help='The Ray cluster to join, host:port; "auto": your own on this host, if one runs. Default: the '
        'one that RAY_ADDRESS names, else "local": start one.'
    ),
]


@serve_options
def serve(
    named_model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="As --model.", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="The cluster's YAML file.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration as a YAML file; start nothing.")
    ] = False,
    ray_address: RayAddress = None,
    ray_address_variable: RayVariable = "",
    *,
    given: ServeOptions,
) -> None:
    """Start the pools and the gateway, and serve until Ctrl-C.

    The options below describe the cluster without a file; beside one, they replace what it says.
    """
    interrupted = catch_signals()
    if named_model is not None:
        if given.model not in (None, named_model):
            raise typer.BadParameter(f"and --model {given.model} contradict each other", param_hint="MODEL")
        given = dataclasses.replace(given, model=named_model)
    choice = ray_choice(ray_address, ray_address_variable)
    is_alone = (choice.address or _LOCAL) == _LOCAL
    asks_gpus = file is None and given.device == "cuda"
    config = announced_config(file, given, Machine().num_gpus(os.environ) if is_alone and asks_gpus else None)
    if print_config:
        text = config_yaml(config)
        print(text, end="")
        if HIDDEN in text:
            err.print(f"passwords are shown as {HIDDEN}; store.redis_url_file names a file for such a URL")
        return
    config = config.with_model(fetched(config.model_source, interrupted))
    # The index server comes from the environment where the file names none.
    url = os.environ.pop("REDIS_URL", "")  # processes that are started here do not get it
    if url and not config.store.has_redis:
        config = config.with_redis_url(url)
    os.environ.pop("RAY_ADDRESS", None)
    refuse_what_cannot_run(config, given, os.environ, ray_address=choice.address or _LOCAL)
    from cluster.serve.launcher import Service  # here: nothing above needs Ray
    from cluster.serve.ray_token import token_place

    service = Service(
        config,
        SystemClock(),
        ray_address=choice.address or _LOCAL,
        environment=os.environ,
        file=file,
    )
    has_served = False
    try:
        with named_by_options(given), stages(err, "starting") as report:
            addresses = service.start(progress_to(report), interrupted)
        if addresses.joined:
            out.print(f"joined {addresses.joined}{choice.reason}", soft_wrap=True, markup=False)
        for name, place in (
            ("gateway", f"[bold]{', '.join(addresses.gateways)}[/]"),
            ("HTTP", ", ".join(addresses.http_urls) or "none"),
            ("admin", ", ".join(addresses.admins)),
            ("console", ", ".join(addresses.consoles) or "none"),
            ("model", config.model),
            ("callers", _callers(config)),
            ("Ray", addresses.ray),
            ("dashboard", addresses.dashboard or "none"),
            ("Ray token", token_place(os.environ)),
            ("logs", addresses.logs or "on the nodes of the Ray cluster"),
            ("dtype", service.dtype_reason),
            ("settings", str(file) if file else "of the options; --print-config prints them as a file"),
        ):
            out.print(f"{name:<10} {place}", soft_wrap=True)
        out.print("Ctrl-C stops everything.")
        service.wait(interrupted)
        has_served = True
    except StartError as error:
        if interrupted.is_set():
            die(str(error), interrupted.status)
        raise
    finally:
        with stages(err, "stopping"):
            try:
                service.stop()
            finally:
                if service.kept_logs is not None and not has_served:
                    err.print(f"logs of Ray's processes: {service.kept_logs}", soft_wrap=True)
    out.print("stopped")


def _callers(config: ClusterConfig) -> str:
    """Say who may call."""
    if config.auth.mode == "required":
        return "authenticated"
    where = "other hosts too" if config.gateway.host not in LOOPBACK else "from this host alone"
    return f"not authenticated, {where}"
