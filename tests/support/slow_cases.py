"""Cases of one test of which only some are fast enough, or tell enough, for `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[str], *fast: str) -> list[Any]:
    """Return the cases as parameters, all but those of `fast` marked as slow."""
    names = list(cases)
    assert set(fast) <= set(names), f"no cases: {set(fast) - set(names)}"
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
