"""The two ends of one lane, without a transfer agent; `channel_process` has them in other processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from patience import WAIT_S

from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, KvMemory, KvPool
from kvtransfer.codec import Message
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.messages import (
    BlockMove,
    Endpoint,
    Lane,
    OpenLanding,
    RankEndpoints,
    ReplicaIdentity,
    Shard,
    TransferReport,
    TransferSettings,
)
from kvtransfer.protocol.fence import Gate
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.base import Channel, Listener, TargetRank, WriterRank

WRITER = ReplicaIdentity("writer", 1)
SETTINGS = TransferSettings("127.0.0.1", ())
LAYOUT = BlockLayout(Shard(0, 4, 0, 4), head_dim=32, block_tokens=8, item_bytes=4)


class Setup(Message, frozen=True):
    """What a rank is: its pool lies on `device` ("host": a HostPool) and is random (`seed`), or zero (0)."""

    transport: str
    shard: Shard
    num_blocks: int
    seed: int
    device: str
    secret: bytes
    faults: tuple[FaultRule, ...] = ()

    @property
    def layout(self) -> BlockLayout:
        return replace(LAYOUT, shard=self.shard)

    def content(self) -> np.ndarray:
        """What the pool holds at first, uint8 [num_blocks, block_bytes]."""
        shape = self.num_blocks, self.layout.block_bytes
        if not self.seed:
            return np.zeros(shape, np.uint8)
        return np.random.default_rng(self.seed).integers(0, 256, shape, np.uint8)

    def pool(self) -> KvPool:
        data = self.content()
        if self.device != "host":
            return DevicePool(self.layout, torch.from_numpy(data).to(self.device))
        memory = KvMemory.allocate(data.size)
        memory.buffer[:] = data.tobytes()
        return HostPool(self.layout, memory)


class Connected(Message, frozen=True):
    device: str
    gb_s: float


class TargetEnd:
    """A pool behind a gate, and the transport's listener."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pool = setup.pool()
        self.reports: list[TransferReport] = []
        self.gate = Gate(self.reports.append)
        rank = TargetRank(0, self.pool, self.gate, setup.secret, SETTINGS)
        self.listener: Listener = TRANSPORTS[setup.transport].listen(rank)

    @property
    def address(self) -> str:
        return self.listener.endpoint.address

    def open(self, *block_ids: int) -> bytes:
        landing_id = draw_id()
        self.gate.open(OpenLanding(landing_id, WRITER, block_ids))
        return landing_id

    def data(self) -> np.ndarray:
        """The whole pool, uint8 [num_blocks, block_bytes]."""
        return pool_data(self.pool)

    def close(self) -> None:
        self.gate.shut()
        self.listener.close()
        self.pool.close()


class WriterEnd:
    """A pool, and the channel of one lane when it is connected."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pool = setup.pool()
        self.lost: list[str] = []
        self._channel: Channel | None = None

    @property
    def channel(self) -> Channel:
        assert self._channel is not None
        return self._channel

    def connect(self, address: str, target: Shard, piece: Shard) -> Connected:
        setup = self.setup
        rank = WriterRank(WRITER, 0, self.pool, setup.secret, Faults(setup.faults), SETTINGS)
        lane = Lane(RankEndpoints(0, target, "here", (Endpoint(setup.transport, address),)), piece)
        transport = TRANSPORTS[setup.transport]
        self._channel = transport.connect(rank, lane, address, draw_id(), self.lost.append)
        return Connected(self._channel.device, self._channel.measure(SystemClock()).gb_s)

    def push(self, landing_id: bytes, moves: Sequence[tuple[int, int]]) -> list[int]:
        channel = self.channel
        channel.begin(landing_id, _never)
        sums = channel.write(landing_id, [BlockMove(src, dst, src) for src, dst in moves], _never)
        channel.flush(landing_id, _never)
        return sums

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def pool_data(pool: KvPool) -> np.ndarray:
    """The whole pool's bytes, uint8 [num_blocks, block_bytes], read without its own methods."""
    if isinstance(pool, DevicePool):
        return pool.tensor.cpu().numpy().copy()
    assert isinstance(pool, HostPool)
    return np.frombuffer(bytes(pool.memory.buffer), np.uint8).reshape(pool.num_blocks, -1)


def piece_of(data: np.ndarray, shard: Shard, piece: Shard) -> np.ndarray:
    """The piece in every block of `data` [blocks, block_bytes] of `shard`: a view [blocks, L, 2, H, size]."""
    num_layers, num_heads = shard.layer_end - shard.layer_start, shard.head_end - shard.head_start
    whole = data.reshape(len(data), num_layers, 2, num_heads, -1)
    layers = slice(piece.layer_start - shard.layer_start, piece.layer_end - shard.layer_start)
    return whole[:, layers, :, piece.head_start - shard.head_start : piece.head_end - shard.head_start]


def landed(target: Setup, writer: Setup, piece: Shard, moves: Sequence[tuple[int, int]]) -> np.ndarray:
    """What the target's pool holds after these moves and nothing else: the reference."""
    expected = target.content()
    sources = piece_of(writer.content(), writer.shard, piece)
    places = piece_of(expected, target.shard, piece)
    for src, dst in moves:
        places[dst] = sources[src]
    return expected


def eventually(condition: object, what: str) -> None:
    """Return when the condition holds; fail when it does not within the deadline."""
    pause = threading.Event()
    assert callable(condition)
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"not within {WAIT_S} s: {what}")


def _never() -> bool:
    return False
