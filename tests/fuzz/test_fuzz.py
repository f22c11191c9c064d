"""A few seconds of every target, always the same cases; `make fuzz` runs as many as there is time for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fuzz.groups import GROUPS
from tests.fuzz.target import bounded, rng_of

SEED = 15


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is refused is logged, thousands of times here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("group", GROUPS)
def test_every_case_ends_as_documented(group: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        for target in GROUPS[group](stack, tmp_path):
            for number in range(target.num_quick):
                try:
                    with bounded():
                        target.run(rng_of(target.name, SEED, number))
                except BaseException as error:
                    error.add_note(f"to repeat: make fuzz CASE='{target.name}:{SEED}:{number}'")
                    raise
