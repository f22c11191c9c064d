"""How `pytest -n` shares the suite out: each file goes to one worker, and all files that start Ray go to the
same one, before any others, so that there is one Ray cluster at a time."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

_MARK = "pytest.mark.cluster"


class FileScheduling(LoadFileScheduling):
    """Give each worker the next file when it has nearly done with the last."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "ray" if starts_ray(self._root / file) else file


@functools.cache
def starts_ray(file: Path) -> bool:
    """Return whether tests of this file are marked as those of a cluster."""
    return _MARK in file.read_text()
