"""A rank's transfer agent with a pool of its own, in this process, and named points where a test cuts in."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Self

import msgspec
import numpy as np
from transfer_harness import Reports, eventually

from kvtransfer.agent.agent import TransferAgent
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout, piece_runs
from kvtransfer.blocks.pool import HostPool
from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.trust import Trust
from kvtransfer.transfer_orders import (
    BlockMove,
    ConnectPeer,
    Lane,
    OpenLanding,
    PieceCheck,
    PushOrder,
    TrafficClass,
    TransferSettings,
    VerifyOrder,
)
from kvtransfer.transfer_reports import LanePath, PeerConnected, TransferReport, Verified

WHOLE = Shard(0, 4, 0, 2)
LAYOUT = BlockLayout(WHOLE, head_dim=64, block_tokens=16, item_bytes=4)
NUM_BLOCKS = 24
TRUST = Trust.of(bytes(32))
WRITER, TARGET = ReplicaIdentity("writer", 1), ReplicaIdentity("target", 1)
BOTH = ("shm", "tcp")


class Hooks(Faults):
    """Calls a function of the test at every passage of a point; armed, so channels go block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: dict[str, Callable[[int], object]] = {}
        self.counts: dict[str, int] = {}

    @property
    def armed(self) -> bool:
        return bool(self.hooks)

    def at(self, point: str) -> bool:
        self.counts[point] = self.counts.get(point, 0) + 1
        if point in self.hooks:
            self.hooks[point](self.counts[point])
        return False


class Rank:
    """One rank's agent over a pool of its own, in this process."""

    def __init__(
        self,
        identity: ReplicaIdentity,
        *,
        shard: Shard = WHOLE,
        rank: int = 0,
        transports: Sequence[str] = BOTH,
        clock: Clock | None = None,
        seed: int | None = None,
        trust: Trust = TRUST,
        **settings: float,
    ) -> None:
        self.identity = identity
        self.rank = rank
        self.layout = BlockLayout(shard, LAYOUT.head_dim, LAYOUT.block_tokens, LAYOUT.item_bytes)
        memory = KvMemory.allocate(NUM_BLOCKS * self.layout.block_bytes)
        self.pool = HostPool(self.layout, memory)
        self.bytes = np.frombuffer(memory.buffer, dtype=np.uint8).reshape(NUM_BLOCKS, -1)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.shape, dtype=np.uint8)
        self.reports = Reports()
        self.on_report: Callable[[TransferReport], object] = lambda report: None
        self.faults = Hooks()
        self.agent = TransferAgent(
            identity=identity,
            rank=rank,
            pools=(self.pool,),
            trust=trust,
            clock=clock or SystemClock(),
            faults=self.faults,
            report=self._report,
            settings=msgspec.structs.replace(
                TransferSettings("127.0.0.1", tuple(transports)),
                **settings,
            ),
        )

    def _report(self, report: TransferReport) -> None:
        self.on_report(report)
        self.reports.put(report)

    def connect(
        self,
        *targets: Rank,
        transports: Sequence[str] = BOTH,
        min_gb_s: float = 0.0,
        refuse_slow: bool = True,
        lanes: Sequence[Lane] | None = None,
    ) -> bytes:
        connection_id = draw_id()
        if lanes is None:
            lanes = [Lane(target.agent.endpoints(), target.layout.shard) for target in targets]
        self.agent.handle(
            ConnectPeer(connection_id, WRITER, TARGET, tuple(lanes), tuple(transports), min_gb_s, refuse_slow)
        )
        return connection_id

    def paths(self) -> tuple[LanePath, ...]:
        return self.reports.take(PeerConnected).paths

    def push(
        self,
        connection_id: bytes,
        landing_id: bytes,
        moves: Sequence[tuple[int, int]],
        *,
        push_id: int = 1,
        traffic: TrafficClass = "hand_over",
    ) -> None:
        pairs = tuple(BlockMove(src, dst, src) for src, dst in moves)
        self.agent.handle(PushOrder(push_id, connection_id, landing_id, pairs, traffic))

    def open(self, *block_ids: int) -> bytes:
        landing_id = draw_id()
        self.agent.handle(OpenLanding(landing_id, WRITER, block_ids))
        return landing_id

    def verify(self, *checks: PieceCheck) -> tuple[int, ...]:
        """Return the bad block indices."""
        self.agent.handle(VerifyOrder(bytes(16), checks))
        return self.reports.take(Verified).bad_block_indices

    def piece(self, block_id: int, shard: Shard) -> bytes:
        runs = piece_runs(self.layout, shard)
        return b"".join(
            self.bytes[block_id, run.src_offset : run.src_offset + run.num_bytes].tobytes() for run in runs
        )

    def break_channel(self, index: int = 0) -> None:
        """Let the connection of a lane end, as when a host or a network fails, and wait until that shows."""
        (connection,) = [each for each in self.agent._connections.values() if not each.has_ended]
        channel = connection._lanes[index].channel
        channel._connections[0].sock.shutdown(socket.SHUT_RDWR)
        eventually(lambda: bool(channel.lost), "the loss of the channel")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.close()
        del self.bytes
        self.pool.close()
