"""A line of a plan, and how its figures are written."""

from __future__ import annotations

from typing import NamedTuple


class PlanLine(NamedTuple):
    """A figure of a plan: `name` in its `group`, the value for people, and how it was computed."""

    group: str
    name: str
    value: str
    formula: str


def gb(num_bytes: float) -> str:
    """Return bytes in GB; small amounts in MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def ms(seconds: float) -> str:
    """Return seconds in milliseconds."""
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e3 * seconds:.2f} ms"


def span(seconds: float) -> str:
    """Return a long time in the unit in which people say it."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
