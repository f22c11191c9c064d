"""The one kind of table that the command line shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

NONE = "-"
"""A cell without a figure."""


def made_table(title: str, *texts: str, numbers: Sequence[str] = ()) -> Table:
    """A table that is narrow enough for 80 columns; the `numbers` stand to the right. Where it still is too
    wide, texts fold: nothing is cut off."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)

    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
