"""The rate at which one process pushes KV blocks into the pool of another, on one device or on two, and the
rate of a plain copy between two cards."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.drawn_trust import draw_trust
from benchmarks.rank_cards import card_of, own_card
from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, KvPool
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import Endpoint, RankEndpoints, ReplicaIdentity
from kvtransfer.protocol.gate import Gate
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.trust import Trust, TrustFiles
from kvtransfer.transfer_orders import BlockMove, Lane, OpenLanding, TransferSettings
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.base import TargetRank, WriterRank
from workers.rank.probe import best_s

CLOCK = SystemClock()


def make_pool(device: torch.device, layout: BlockLayout, num_blocks: int) -> KvPool:
    """Make a pool of zeros on the device, or in host memory that another process can map."""
    if device.type == "cpu":
        return HostPool(layout, KvMemory.allocate(num_blocks * layout.block_bytes))
    shape = num_blocks, layout.block_bytes
    return DevicePool(layout, torch.zeros(shape, dtype=torch.uint8, device=device))


def push_rate(
    device: torch.device,
    layout: BlockLayout,
    num_blocks: int,
    *,
    is_busy: bool = False,
    is_across: bool = False,
    transport: str | None = None,
    writer_device: torch.device | None = None,
) -> float:
    """Return the bytes a second at which another process writes blocks into a pool of this one, all of them
    at once. With `is_busy`, a thread of the writer computes at the same time, as a rank does, and each push
    begins a landing. The transport is that of pools on one device, and the writer's device this one, unless
    they are given. With `is_across` the writer has the next card, which it alone sees, as under Ray."""
    transport = transport or ("cuda_ipc" if device.type == "cuda" else "shm")
    trust = draw_trust()
    gate = Gate(lambda _: None)
    pool = make_pool(device, layout, num_blocks)
    settings = TransferSettings("127.0.0.1", ())
    listener = TRANSPORTS[transport].listen(TargetRank(0, (pool,), gate, Trust.read(trust), settings))
    landing_ids = tuple(draw_id() for _ in range(_NUM_LANDINGS if is_busy else 1))
    for landing_id in landing_ids:
        gate.open(OpenLanding(landing_id, _WRITER, tuple(range(num_blocks))))
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    address = listener.endpoint.address
    environment = own_card((device.index or 0) + 1) if is_across else {}
    writes_from = "cuda:0" if is_across else str(writer_device or device)
    order = PushRate(writes_from, layout, num_blocks, transport, address, trust, landing_ids, is_busy)
    with contextlib.closing(listener):
        writer = context.Process(target=_report_rate, args=(order, sender))
        with mock.patch.dict(os.environ, environment):  # which the process inherits
            writer.start()
        sender.close()
        try:
            rate: float = receiver.recv()
        finally:
            writer.join()
            gate.shut()
    return rate


class PushRate(NamedTuple):
    """The order for the writing process to measure a push."""

    device: str
    layout: BlockLayout
    num_blocks: int
    transport: str
    address: str
    trust: TrustFiles
    # One for each push; a single one is for all.
    landing_ids: tuple[bytes, ...]
    is_busy: bool


_NUM_LANDINGS = 24
# Products that are queued at a time.
_NUM_QUEUED = 8
_WRITER = ReplicaIdentity("writer", 1)


def _report_rate(order: PushRate, sender: Connection) -> None:
    """Push all blocks a few times, in the writing process, and send the best rate."""
    device = torch.device(order.device)
    pool = make_pool(device, order.layout, order.num_blocks)
    settings = TransferSettings("127.0.0.1", ())
    rank = WriterRank(_WRITER, 0, pool, Trust.read(order.trust), Faults(()), settings)
    shard = order.layout.shard
    lane = Lane(RankEndpoints(0, shard, "here", (Endpoint(order.transport, order.address),)), shard)
    channel = TRANSPORTS[order.transport].connect(rank, lane, order.address, draw_id(), lambda _: None)
    with contextlib.closing(channel):
        moves = [BlockMove(block, block, block) for block in range(order.num_blocks)]

        def push(landing_id: bytes) -> None:
            channel.begin(landing_id, lambda: False)
            channel.write(landing_id, moves, lambda: False)
            channel.flush(landing_id, lambda: False)

        if order.is_busy:
            with _computing(device):
                seconds = _median_s(push, order.landing_ids)
        else:
            (landing_id,) = order.landing_ids
            channel.begin(landing_id, lambda: False)
            seconds = best_s(lambda: push(landing_id), CLOCK, device, 5)
        sender.send(order.num_blocks * order.layout.block_bytes / seconds)


def copy_rate_across(device: torch.device, num_bytes: int) -> float:
    """Return the bytes a second of a plain copy to a device from the next card, by this process."""
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    source = torch.zeros_like(target, device=card_of((device.index or 0) + 1))
    return num_bytes / best_s(lambda: target.copy_(source, non_blocking=True), CLOCK, device, 5)


def _median_s(push: Callable[[bytes], None], landing_ids: Sequence[bytes]) -> float:
    """Return the median time of a push."""
    times: list[float] = []
    for landing_id in landing_ids:
        started_at = CLOCK.now()
        push(landing_id)
        times.append(CLOCK.now() - started_at)
    return statistics.median(times)


@contextlib.contextmanager
def _computing(device: torch.device) -> Iterator[None]:
    """Keep the device busy with products of about a millisecond, queued by another thread of this process."""
    ended, started = threading.Event(), threading.Event()
    size = 8192 if device.type == "cuda" else 256

    def compute() -> None:
        factor = torch.zeros((size, size), dtype=torch.bfloat16, device=device)
        product = torch.empty_like(factor)
        while not ended.is_set():
            for _ in range(_NUM_QUEUED):
                torch.mm(factor, factor, out=product)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            started.set()

    thread = threading.Thread(target=compute, name="computes")
    thread.start()
    started.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()
