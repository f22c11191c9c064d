"""Fetching the model that a command is given by name, with a bar while it arrives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cluster.cli.progress_report import stages
from cluster.cli.terminal import err
from cluster.model_source.fetch_context import FetchContext, FetchProgress
from cluster.model_source.source import ModelSource


def fetched(
    source: ModelSource, interrupted: threading.Event | None = None, *, prefer_cached: bool = False
) -> ModelSource:
    """Return the model with its version when its files are on this host; `ConfigError` or `StartError` says
    what keeps them away. Shows nothing where they are here."""
    if source.name is None:
        return source
    with _shown() as report:
        context = FetchContext(report, interrupted or threading.Event())
        return source.fetch(context, prefer_cached=prefer_cached)


@contextmanager
def _shown() -> Iterator[Callable[[FetchProgress], None]]:
    """Show a bar on a terminal, otherwise a line for each stage, and how far it is every few seconds."""
    if not err.is_terminal:
        with stages(err, "looking for the model") as say:
            yield lambda progress: say(progress.stage, progress.text)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("looking for the model", total=None)

        def show(progress: FetchProgress) -> None:
            total = progress.total_bytes or None
            bar.update(task, description=progress.stage, completed=progress.num_bytes, total=total)

        yield show
