"""The time of sums over two ranks of a stage, each in a process of its own, in graphs of many.

Ranks have a card each if there are two. On one card that both share they take turns by time slices, so that
the figure is that of a slice, and NCCL has none."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from benchmarks.drawn_trust import draw_trust
from benchmarks.rank_cards import card_of
from kvtransfer.common.clock import SystemClock
from kvtransfer.rpc.trust import Trust, TrustFiles
from workers.rank.collectives import RankGroups
from workers.rank.one_shot_group import OneShotGroup
from workers.rank.probe import best_s

CLOCK = SystemClock()
TP = 2
# Of hidden states of 4,096 in 16 bits: batches of 1, 8, 32 and 64.
SIZES = (8 << 10, 64 << 10, 256 << 10, 512 << 10)
_NUM_SUMS = 32


class TimedSum(NamedTuple):
    """Microseconds of one sum of `num_bytes` by each way; None: NCCL does not serve these ranks."""

    num_bytes: int
    one_shot_us: float
    nccl_us: float | None


def time_sums() -> list[TimedSum]:
    """Time sums of `SIZES` between two processes."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    trust = draw_trust()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run, args=(rank, str(Path(folder) / "store"), trust, sender))
            for rank in range(TP)
        ]
        for rank in ranks:
            rank.start()
        sender.close()
        try:
            found: list[TimedSum] = receiver.recv()
        finally:
            for rank in ranks:
                rank.join()
    return found


def _run(rank: int, store_path: str, trust: TrustFiles, sender: Connection) -> None:
    """Be one rank; the first sends what it has timed."""
    device = card_of(rank)
    torch.cuda.set_device(device)
    store: Store = dist.FileStore(store_path, TP)  # type: ignore[attr-defined]  # not in the stubs
    groups = RankGroups(
        store,
        tp=TP,
        pp=1,
        rank=rank,
        device=device,
        host="127.0.0.1",
        host_id="here",
        trust=Trust.read(trust),
    )
    group = groups._layer_group
    assert isinstance(group, OneShotGroup), "the ranks have not mapped each other's memory"
    timed: list[TimedSum] = []
    for num_bytes in SIZES:
        tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        one_shot_us = _sum_us(group.all_reduce, tensor)
        nccl_us = None if group.large is None else _sum_us(group.large.all_reduce, tensor)
        timed.append(TimedSum(num_bytes, one_shot_us, nccl_us))
    group.check()
    if rank == 0:
        sender.send(timed)
    groups.close()


def _sum_us(all_reduce: Callable[[Tensor], None], tensor: Tensor) -> float:
    """Return the microseconds of a sum, in a graph of `_NUM_SUMS`."""
    all_reduce(tensor)  # compiles and connects
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_NUM_SUMS):
            all_reduce(tensor)
    return best_s(graph.replay, CLOCK, tensor.device, 20) / _NUM_SUMS * 1e6
