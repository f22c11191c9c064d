"""Part of `benchmarks.gpu` about KV between two cards: an NCCL pair beside a plain send of the same bytes.

Both processes of either way have a card each. On a CPU a pair of `gloo` and a plain send over gloo stand in
for them."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.push_rate import push_rate
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.common.clock import SystemClock
from workers.rank.probe import synchronize

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

CLOCK = SystemClock()
_TARGET, _WRITER = 0, 1
# The first connects and takes the pages.
_NUM_SENDS = 6
# Of a process whose other one has failed.
_TIMEOUT = timedelta(seconds=60)


class PairRate(NamedTuple):
    """Bytes a second of pushes through a pair, and of plain sends of as many bytes."""

    pushed: float
    plain: float


def nccl_pair(bench: Bench) -> Iterator[dict[str, object]]:
    """KV pushed between two cards by an NCCL pair: its rate over that of a plain send of the same bytes."""
    # Here, since that module loads this one.
    from benchmarks.gpu import block_layout

    if bench.device.type != "cuda" or torch.cuda.device_count() < 2:
        raise RuntimeError("this part needs two CUDA devices")
    devices = torch.device("cuda", 0), torch.device("cuda", 1)
    rate = pair_rate(devices, block_layout(bench.sizes), bench.sizes.num_pushed_blocks)
    yield {
        "figure": "nccl_pair_gb_s",
        "value": rate.pushed / 1e9,
        "limit": rate.plain / 1e9,
        "ratio": rate.pushed / rate.plain,
        "target": 0.8,
    }


def pair_rate(devices: tuple[torch.device, torch.device], layout: BlockLayout, num_blocks: int) -> PairRate:
    """Measure pushes of so many blocks between the devices of a target and a writer, then plain sends."""
    target, writer = devices
    backend = "nccl" if target.type == "cuda" else "gloo"
    pushed = push_rate(target, layout, num_blocks, transport=backend, writer_device=writer)
    return PairRate(pushed, plain_rate(backend, devices, num_blocks * layout.block_bytes))


def plain_rate(backend: str, devices: tuple[torch.device, torch.device], num_bytes: int) -> float:
    """Return the bytes a second at which one process of a torch process group sends so many bytes to another,
    the best of a few sends."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        order = PlainSends(backend, str(Path(folder) / "store"), num_bytes)
        ranks = [
            context.Process(
                target=_send_plainly, args=(order, rank, str(device), sender if rank == _WRITER else None)
            )
            for rank, device in enumerate(devices)
        ]
        for rank in ranks:
            rank.start()
        sender.close()
        try:
            seconds: float = receiver.recv()
        finally:
            for rank in ranks:
                rank.join()
    return num_bytes / seconds


class PlainSends(NamedTuple):
    """The order for both processes of plain sends."""

    backend: str
    store_path: str
    num_bytes: int


def _send_plainly(order: PlainSends, rank: int, device_name: str, sender: Connection | None) -> None:
    """Be one rank. The writer sends what a send takes until the target has answered it."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(order.store_path, 2)  # type: ignore[attr-defined]  # not in the stubs
    dist.init_process_group(order.backend, timeout=_TIMEOUT, store=store, rank=rank, world_size=2)
    data = torch.zeros(order.num_bytes, dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    times: list[float] = []
    for _ in range(_NUM_SENDS):
        started_at = CLOCK.now()
        if rank == _WRITER:
            dist.send(data, _TARGET)
            dist.recv(answer, _TARGET)
        else:
            dist.recv(data, _WRITER)
            dist.send(answer, _WRITER)
        synchronize(device)
        times.append(CLOCK.now() - started_at)
    if sender is not None:
        sender.send(min(times[1:]))
    dist.destroy_process_group()
