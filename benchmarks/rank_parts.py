"""Ranks of one stage for benchmarks: processes of a benchmark's own module, joined by the collectives of
replicas.

Each is started as `python -m MODULE --part ORDER`. The order, as JSON, has `num_ranks`, `links` ("memory" or
"gloo") and what the benchmark adds. A rank prints a JSON line for each figure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kvtransfer.rpc.trust import Trust
from workers.rank.collectives import RankGroups, find_store, open_store

_HOST = "127.0.0.1"


@contextmanager
def rank_parts(module: str, order: dict[str, Any]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes of all ranks, and wait in the end until they have ended."""
    store, address = open_store(_HOST)
    with ExitStack() as parts:
        yield [
            parts.enter_context(_part(module, {**order, "rank": rank, "address": address}))
            for rank in range(order["num_ranks"])
        ]
    del store


@contextmanager
def _part(module: str, order: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--part", json.dumps(order)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.wait()


def answer(process: subprocess.Popen[str]) -> Any:
    """Read the next figure of a rank; the benchmark ends where the rank has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a rank of the benchmark ended early")
    return json.loads(line)


def joined_groups(order: dict[str, Any]) -> RankGroups:
    """Join the others, as the rank that the order names, with one thread."""
    torch.set_num_threads(1)
    return RankGroups(
        find_store(order["address"]),
        tp=order["num_ranks"],
        pp=1,
        rank=order["rank"],
        device=torch.device("cpu"),
        host=_HOST,
        host_id="here" if order["links"] == "memory" else "",
        trust=Trust.of(b"between the ranks of this benchmark"),
    )
