"""Choose the Ray cluster of a command."""

from __future__ import annotations

from typing import NamedTuple


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
