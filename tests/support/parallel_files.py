"""How `pytest -n` shares the suite out: each file goes to one worker, and all files that start Ray go to the
same one, before any others, so that there is one Ray cluster at a time; and how workers read the files."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TypeVar

import pytest
from xdist.scheduler import LoadFileScheduling

_MARK = "pytest.mark.cluster"
_Node = TypeVar("_Node")


class FileScheduling(LoadFileScheduling):
    """Give each worker the next file when it has nearly done with the last."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "ray" if starts_ray(self._root / file) else file


def rotated(found: list[_Node]) -> list[_Node]:
    """Return what a folder holds so that each worker begins to read it at another place.

    All workers read all files. pytest compiles a file that it has not met before, with its asserts, and keeps
    the result: so each worker compiles a part of a fresh clone, and finds the others' parts."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = len(found) * number // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return found[first:] + found[:first]


def in_one_order(items: list[pytest.Item]) -> None:
    """Sort the tests as all workers must have them: those that start Ray, which take longest, come first."""
    items.sort(key=lambda item: (not starts_ray(item.path), str(item.path)))


@functools.cache
def starts_ray(file: Path) -> bool:
    """Return whether tests of this file are marked as those of a cluster."""
    return _MARK in file.read_text()
