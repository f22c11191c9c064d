"""Spans of time as people write them on the command line."""

from __future__ import annotations

import re

import typer

_UNIT_TO_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")


def read_duration_s(text: str, option: str) -> float:
    """Return the seconds of `90`, `90s`, `10m` or `2h`; `BadParameter` names the option that has another
    text."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise typer.BadParameter(
            f"expected a time above 0 such as 90s, 10m or 2h, not {text!r}", param_hint=option
        )
    return float(found[1]) * _UNIT_TO_S[found[2]]
