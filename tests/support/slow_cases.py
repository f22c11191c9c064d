"""Cases of one test of which only some are fast enough, or tell enough, for `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Return the cases as parameters, all but those of `fast` marked as slow."""
    every = list(cases)
    assert set(fast) <= set(every), f"no cases: {set(fast) - set(every)}"
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in every]
