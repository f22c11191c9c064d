"""The server that `tandem chat MODEL` starts for its chat, and ends with it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import NoReturn

from cluster.api.blocking_client import BlockingClient
from cluster.api.channel import ClientCredentials
from cluster.cli.model_download import fetched
from cluster.cli.progress_report import progress_to, stages
from cluster.cli.refusals import refuse_what_cannot_run
from cluster.cli.serve_options import ServeOptions, announced_config, named_by_options
from cluster.cli.terminal import catch_signals, die, err
from cluster.config import ClusterConfig
from cluster.errors import CallError, ConfigError, StartError
from cluster.text.chat_template import load_chat_template
from kvtransfer.common.clock import SystemClock
from workers.model.model_folder import described_folder

_LOCAL = "local"


@contextlib.contextmanager
def chat_server(
    options: ServeOptions, address: str, credentials: ClientCredentials, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield the address of a gateway that serves the model of `options`: the one at `address`, if it serves a
    model of this name to this caller, or one of our own.

    Our own is on free ports of this host, so that others may run beside it. Its start is shown on standard
    error; `ConfigError` or `StartError` says why it cannot be, and an interruption ends the command.
    Everything is stopped at the end.
    """
    interrupted = catch_signals()
    config = announced_config(None, options)
    if _is_served(config.model_name, address, credentials):
        _chat_signals()
        err.print(f"{config.model_name} is served at {address} already", highlight=False, markup=False)
        yield address
        return
    config = config.with_model(fetched(config.model_source, interrupted))
    _check_template(config, options)
    refuse_what_cannot_run(config, options, environment, ray_address=_LOCAL)
    from cluster.serve.launcher import Service  # here: nothing above needs Ray

    service = Service(config, SystemClock(), ray_address=_LOCAL, environment=environment)
    has_served = False
    try:
        with named_by_options(options), stages(err, f"loading {config.model_name}") as report:
            addresses = service.start(progress_to(report), interrupted)
        has_served = True
        _chat_signals()
        if interrupted.is_set():
            raise StartError("interrupted")
        yield addresses.gateways[0]
    except StartError as error:
        if interrupted.is_set():
            die(str(error), interrupted.status)
        raise
    finally:
        catch_signals()
        with stages(err, "stopping"):
            try:
                service.stop()
            finally:
                if service.kept_logs is not None and not has_served:
                    err.print(f"logs of Ray's processes: {service.kept_logs}", soft_wrap=True)


def _is_served(name: str, address: str, credentials: ClientCredentials) -> bool:
    """Return whether a gateway there serves a model of this name to this caller."""
    try:
        with BlockingClient(address, credentials=credentials) as client:
            return any(model.name == name for model in client.models())
    except CallError:
        return False


def _check_template(config: ClusterConfig, options: ServeOptions) -> None:
    """Raise `ConfigError` for a model that cannot chat."""
    if load_chat_template(described_folder(config.model_path, options.model_cache)) is None:
        raise ConfigError(
            f"{config.model_name} has no chat template, so it cannot chat; serve it with `tandem serve`, and "
            "continue a text with `tandem generate`"
        )


def _chat_signals() -> None:
    """Have Ctrl-C raise `KeyboardInterrupt` again, and SIGTERM end the command in its own order."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
