"""Cases and examples of one test of which only some are fast enough, or tell enough, for `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

# The profile of Hypothesis under which `make test` runs.
FAST_PROFILE = "fast suite"


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Return the cases as parameters, all but those of `fast` marked as slow."""
    every = list(cases)
    assert set(fast) <= set(every), f"no cases: {set(fast) - set(every)}"
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in every]


def slow_rows_but(rows: Iterable[tuple[Any, ...]], *fast: tuple[Any, ...]) -> list[Any]:
    """Return rows of values of several parameters, all but those of `fast` marked as slow."""
    every = list(rows)
    assert set(fast) <= set(every), f"no cases: {set(fast) - set(every)}"
    return [pytest.param(*row, marks=[] if row in fast else pytest.mark.slow) for row in every]


def examples(num_examples: int) -> int:
    """Return how many examples a test draws, of as many as it needs: a fifth of them for `make test`."""
    return num_examples // 5 if settings.get_current_profile_name() == FAST_PROFILE else num_examples
