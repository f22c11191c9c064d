"""What all commands share: consoles, common options, tables, progress, interruption and exit."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, Protocol

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtransfer.common.clock import Clock, SystemClock

if TYPE_CHECKING:  # its module imports Ray, which takes seconds
    from cluster.serve.launcher import StartProgress

out, err = Console(), Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text for people.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Seconds until the request is given up.")]
# Read by this command line alone, and said where it decides: Ray itself would follow it silently.
RayVariable = Annotated[str, typer.Option(envvar="RAY_ADDRESS", hidden=True, show_envvar=False)]
# Of the bundled model: in an installed wheel, and in a checkout of the sources.
_BUNDLED_MODELS = (
    Path(__file__).resolve().parents[1] / "bundled_model",
    Path(__file__).resolve().parents[2] / "models" / "tiny",
)
BUNDLED_MODEL = next((folder for folder in _BUNDLED_MODELS if folder.is_dir()), _BUNDLED_MODELS[0])


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        print(f"tandem {importlib.metadata.version('tandem-serve')}")
        raise typer.Exit


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or until Ctrl-C."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        die("interrupted", 130)


class Interruption(threading.Event):
    """Represents an interruption of the command: set by Ctrl-C and SIGTERM."""

    # The exit status of a command that was interrupted before its work began, as a shell reports it.
    status = 128 + signal.SIGINT

    def catch(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; this is the handler of both."""
        self.status = 128 + number
        self.set()


def catch_signals() -> Interruption:
    """Have Ctrl-C and SIGTERM set the returned event and do nothing else: the command ends in its own
    order."""
    interrupted = Interruption()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted.catch)
    return interrupted


def die(message: str, code: int = 1) -> NoReturn:
    """Print one line on standard error, and exit with `code`."""
    err.print(f"[red]tandem:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(code)


def die_at_once(message: str, code: int = 1) -> NoReturn:
    """Exit as `die` does, without waiting for threads and for exit handlers of libraries."""
    err.print(f"[red]tandem:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    os._exit(code)


# ----------------------------------------------------------------------------------------------
# The one kind of table that the command line shows.

# A cell without a value.
NONE = "-"


def made_table(title: str, *texts: str, numbers: Sequence[str] = ()) -> Table:
    """Return a table that is narrow enough for 80 columns, with the `numbers` aligned to the right. Texts
    fold where it is still too wide: nothing is cut off."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)

    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


# ----------------------------------------------------------------------------------------------
# What is going on while a command waits.


_DETAIL_S = 10.0
_SYSTEM_CLOCK = SystemClock()


def progress_line(stage: str, ready: dict[str, tuple[int, int]]) -> str:
    """Return `loading: prefill 1 of 1, decode 0 of 1`; `ready` is pool name to (replicas ready, wanted)."""
    pools = ", ".join(f"{name} {num} of {wanted}" for name, (num, wanted) in ready.items())
    return f"{stage}: {pools}" if pools else stage


class Report(Protocol):
    """Shows what goes on; `detail` changes more often than the stage."""

    def __call__(self, stage: str, detail: str = "") -> None: ...


@contextlib.contextmanager
def stages(console: Console, first: str, clock: Clock = _SYSTEM_CLOCK) -> Iterator[Report]:
    """Show the stage: by a spinner on a terminal, otherwise by a line whenever the stage changes, and with
    the detail every `_DETAIL_S`."""
    if console.is_terminal:
        with console.status(first) as status:
            yield lambda stage, detail="": status.update(f"{stage}; {escape(detail)}" if detail else stage)
        return
    last, said_at = "", clock.now()

    def report(stage: str, detail: str = "") -> None:
        nonlocal last, said_at
        is_due = bool(detail) and clock.now() >= said_at + _DETAIL_S
        if stage != last or is_due:
            last, said_at = stage, clock.now()
            text = f"{stage}; {detail}" if is_due else stage
            console.print(text, soft_wrap=True, highlight=False, markup=False)

    report(first)
    yield report


def progress_to(report: Report) -> Callable[[StartProgress], None]:
    """Return what shows the progress of a start or an update."""
    return lambda it: report(progress_line(it.stage, it.ready), it.detail)


class RayChoice(NamedTuple):
    """Represents which Ray cluster a command was told to use."""

    # As given; "": nothing was.
    address: str
    # "; RAY_ADDRESS names it", where that is why.
    reason: str = ""


def ray_choice(option: str | None, variable: str) -> RayChoice:
    """Return the option, which goes before the environment variable RAY_ADDRESS."""
    if option is None and variable:
        return RayChoice(variable, "; RAY_ADDRESS names it")
    return RayChoice(option or "")


def traffic_line(shares: Mapping[str, float]) -> str:
    """Return `tandem 90 %, tandem-v2 10 %`."""
    return ", ".join(f"{name} {100 * share:g} %" for name, share in sorted(shares.items()))


def bundled_model() -> Path:
    """Return the folder of the bundled model; a usage error where there is none."""

    if not BUNDLED_MODEL.is_dir():
        raise typer.BadParameter("no model is bundled with this installation; name one", param_hint="--model")
    return BUNDLED_MODEL
