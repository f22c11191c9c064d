"""The rate at which one process pushes KV blocks into the pool of another on the same device."""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from benchmarks.drawn_trust import draw_trust
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


def push_rate(device: torch.device, layout: BlockLayout, num_blocks: int) -> float:
    """Return the bytes a second at which another process writes blocks into a pool of this one."""
    transport = "cuda_ipc" if device.type == "cuda" else "shm"
    trust = draw_trust()
    gate = Gate(lambda _: None)
    pool = make_pool(device, layout, num_blocks)
    settings = TransferSettings("127.0.0.1", ())
    listener = TRANSPORTS[transport].listen(TargetRank(0, (pool,), gate, Trust.read(trust), settings))
    landing_id = draw_id()
    gate.open(OpenLanding(landing_id, _WRITER, tuple(range(num_blocks))))
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    order = PushRate(str(device), layout, num_blocks, transport, listener.endpoint.address, trust, landing_id)
    with contextlib.closing(listener):
        writer = context.Process(target=_report_rate, args=(order, sender))
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
    landing_id: bytes


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

        def push() -> None:
            channel.write(order.landing_id, moves, lambda: False)
            channel.flush(order.landing_id, lambda: False)

        channel.begin(order.landing_id, lambda: False)
        seconds = best_s(push, CLOCK, device, 5)
        sender.send(order.num_blocks * order.layout.block_bytes / seconds)
