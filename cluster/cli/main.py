"""The command line, `tandem`: what calls a gateway, and the demo. The other commands are loaded when they are
run."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from cluster.api.blocking_client import BlockingClient
from cluster.api.channel import ClientCredentials
from cluster.api.generate_options import Turn, generate_request
from cluster.cli import calls
from cluster.cli.chat_pipe import PipeScreen, chat_through_pipe
from cluster.cli.chat_terminal import chat_on_terminal
from cluster.cli.command_group import LazyCommands
from cluster.cli.gateway_options import AdminOptions, InferenceOptions, gateway_options
from cluster.cli.sampling_options import SamplingOptions, sampling_options
from cluster.cli.terminal import (
    AsJson,
    Timeout,
    bundled_model,
    catch_signals,
    die,
    die_at_once,
    err,
    out,
    run,
    show_version,
)
from cluster.errors import CallError, ClusterError, RayEndedError, StartError
from cluster.text.validation import check_values
from kvtransfer.common.clock import SystemClock
from workers.errors import WorkerError

_HELP = "Serve a large language model on Ray, with prefill and decode in separate pools."
# Defaults of the environment for Ray and for every process started below.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    # Ray prints the first for every process that ends early, beside our line with the reason, and the second
    # where a replica has many ranks.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|worker processes have been started",
    # By default glibc keeps up to eight heaps for a core, and what the threads of one free no other takes:
    # processes with forty threads grow for hours.
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GRPC_VERBOSITY": "ERROR",
}

cli = typer.Typer(
    cls=LazyCommands,
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version.")
    ] = False,
) -> None:
    """Take the options before a command; the help text is that of `cli`."""


def main() -> None:
    """Run the command line, and end with one line for each expected error."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        cli()
    except CallError as error:
        die(_call_failed(error))
    except RayEndedError as error:
        # A regular exit would wait a minute for Ray.
        die_at_once(str(error))
    except (ClusterError, WorkerError) as error:
        die(str(error))


@cli.command()
def demo(as_json: AsJson = False) -> None:
    """Serve the bundled model for a moment, send requests that share a prefix, show what happened."""
    interrupted = catch_signals()
    from cluster.cli.demo import run_demo  # here, as above

    try:
        rows = run_demo(bundled_model(), SystemClock(), interrupted, err if as_json else out)
    except StartError as error:
        if interrupted.is_set():
            die(str(error), interrupted.status)
        raise
    if as_json:
        typer.echo(json.dumps({"requests": [row._asdict() for row in rows]}))


@cli.command()
@gateway_options
@sampling_options
def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from standard input.')],
    as_json: AsJson = False,
    chat: Annotated[bool, typer.Option(help="PROMPT is a user's message in a chat.")] = False,
    n: Annotated[int | None, typer.Option(help="Continuations of the one prompt.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Of this many likeliest tokens; --json only.")] = None,
    request_id: Annotated[str, typer.Option(help="For `tandem explain`; default: drawn.")] = "",
    timeout: Timeout = None,
    *,
    sampling: SamplingOptions,
    to: InferenceOptions,
) -> None:
    """Continue PROMPT; the text streams as it comes."""
    options = sampling.generate_options(n=n, logprobs=logprobs, request_id=request_id)
    text = _standard_input() if prompt == "-" else prompt
    asked = [Turn("user", text)] if chat else text
    run(calls.generate(to.address, asked, options, timeout, as_json=as_json, who=to.credentials()))


@cli.command("chat")
@gateway_options
@sampling_options
def chat_command(
    served_model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="As of `tandem serve`: served here for the chat, unless --address serves it already. "
            "Default: chat with what --address serves.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Of a MODEL that is served here: cpu or cuda.")] = None,
    system: Annotated[str, typer.Option(help="The system prompt; /system changes it.")] = "",
    history: Annotated[
        str | None,
        typer.Option(
            help='Where what you type is kept; "": nowhere. Default: tandem/chat_history in the state folder.'
        ),
    ] = None,
    as_json: AsJson = False,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds until an answer is given up.")
    ] = None,
    *,
    sampling: SamplingOptions,
    to: InferenceOptions,
) -> None:
    """Chat with a model; /help lists the commands, Ctrl-C ends an answer, Ctrl-D the chat.

    Where standard input or output is no terminal, each line is answered by one line.
    """
    options = sampling.generate_options()
    check_values(generate_request([Turn("user", system)], options))
    who = to.credentials()
    try:
        with (
            _chat_address(served_model, device, to.address, who) as address,
            BlockingClient(address, credentials=who) as client,
        ):
            if sys.stdin.isatty() and sys.stdout.isatty() and not as_json:
                file = _chat_history() if history is None else Path(history) if history else None
                chat_on_terminal(client, options, out, system=system, timeout_s=timeout, history=file)
            else:
                source = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8")
                screen = PipeScreen(sys.stdout, err, as_json=as_json)
                chat_through_pipe(client, options, source, screen, system=system, timeout_s=timeout)
    except KeyboardInterrupt:
        die("interrupted", 130)


@cli.command("models")
@gateway_options
def models_command(as_json: AsJson = False, *, to: InferenceOptions) -> None:
    """The served models: context, vocabulary, and whether they can chat."""
    run(calls.models(to.address, out, as_json=as_json, who=to.credentials()))


@cli.command()
@gateway_options
def status(
    as_json: AsJson = False,
    *,
    to: AdminOptions,
) -> None:
    """The replicas, their loads, and the measured paths between them."""
    run(calls.status(to.admin_address, out, as_json=as_json, who=to.credentials()))


@cli.command()
@gateway_options
def explain(
    request_id: str,
    admin_address: Annotated[
        str, typer.Option(help="Ask the gateway's port for operators, for a request of any tenant.")
    ] = "",
    as_json: AsJson = False,
    *,
    to: InferenceOptions,
) -> None:
    """Where a running or recent request went, and why."""
    who = to.credentials()
    run(calls.explain(to.address, admin_address, request_id, out, as_json=as_json, who=who))


def _chat_address(
    model: str | None, device: str | None, address: str, who: ClientCredentials
) -> AbstractContextManager[str]:
    """Return a context with the address of the gateway to chat with."""
    if model is None:
        if device is not None:
            raise typer.BadParameter("is that of a MODEL; name one", param_hint="--device")
        return nullcontext(address)
    from cluster.cli.chat_server import chat_server  # here: without MODEL, nothing of it is needed
    from cluster.cli.serve_options import ServeOptions

    os.environ.pop("RAY_ADDRESS", None)  # Ray itself would follow it
    options = ServeOptions(model=model, device=device, prefill=0, port=0)
    return chat_server(options, address, who, os.environ)


def _call_failed(error: CallError) -> str:
    """Say why a call failed, and what to do."""
    if error.is_refusal:
        return f"refused: {error.message}; try again in {error.retry_after_s:.1f} s"
    hint = "; does `tandem serve` run there?" if "Connection refused" in error.message else ""
    return f"{error}{hint}"


def _chat_history() -> Path:
    """Return the file in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return folder / "tandem" / "chat_history"


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8: {error}", param_hint="PROMPT") from error
