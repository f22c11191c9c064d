"""What all commands share: consoles, common options, tables, interruption and exit."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# What users have written is shown as it is: `a:b:` is no emoji.
out, err = Console(emoji=False), Console(stderr=True, emoji=False)

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


def traffic_line(shares: Mapping[str, float]) -> str:
    """Return `tandem 90 %, tandem-v2 10 %`."""
    return ", ".join(f"{name} {100 * share:g} %" for name, share in sorted(shares.items()))


def bundled_model() -> Path:
    """Return the folder of the bundled model; a usage error where there is none."""

    if not BUNDLED_MODEL.is_dir():
        raise typer.BadParameter("no model is bundled with this installation; name one", param_hint="--model")
    return BUNDLED_MODEL
