"""Ranks that share a card and start at once. Needs a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from import_path import import_path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Of the card: two ranks with `gpus_per_rank: 0.5` and the default `memory_share`.
SHARE = 0.45


def kv_of(num_ranks: int, go: Path) -> list[int]:
    """Start so many ranks at once, and return how many blocks each got."""
    command = [sys.executable, str(HERE / "rank_kv.py"), str(SHARE), str(go)]
    env = {**os.environ, "PYTHONPATH": import_path(ROOT)}
    ranks = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(num_ranks)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        go.touch()
        return [int(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.gpu
def test_two_ranks_that_start_at_once_get_the_kv_of_one_alone(tmp_path: Path) -> None:
    (alone,) = kv_of(1, tmp_path / "alone")
    together = kv_of(2, tmp_path / "together")
    assert together == [pytest.approx(alone, rel=0.03)] * 2
