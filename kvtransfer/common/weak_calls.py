"""Call back an object without keeping it alive.

An object that hands its own methods to its parts is in a cycle with them. Cycles wait for the garbage
collector, which looks for old objects once in hours in a process that has many.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Return a function that calls a bound method, and does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (found := reference()) is not None:
            found(*args, **kwargs)

    return call
