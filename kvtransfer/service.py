"""The transfer agent of a rank: takes the brain's transfer orders, moves bytes on threads, reports back.

As a writer it holds `WriterConnection`s and the `PushFence`; as a target it holds listeners and the `Gate`.
The rank's own thread calls `handle`, which never waits; `report` is called from any thread, one call at a
time, and must not wait for anything that another report brings.
"""

from __future__ import annotations

import hashlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kvtransfer.checksum import Checksummer
from kvtransfer.clock import Clock
from kvtransfer.faults import Faults
from kvtransfer.fence import PushFence
from kvtransfer.gate import Gate
from kvtransfer.layout import BlockLayout, piece_runs
from kvtransfer.memory import KvMemory
from kvtransfer.messages import (
    CloseLanding,
    ClosePeer,
    ConnectPeer,
    OpenLanding,
    PieceCheck,
    PushOrder,
    RankEndpoints,
    ReplicaIdentity,
    StopPush,
    TransferOrder,
    TransferReport,
    Verified,
    VerifyOrder,
)
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.base import Listener, TargetRank, WriterRank
from kvtransfer.writer import WriterConnection

TRANSFER_THREADS = "kv-"
"""The names of the threads without which nothing moves or is verified start with this."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


class TransferAgent:
    """Everything of a rank that moves KV. Listens from its construction until `close`."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        rank: int,
        layout: BlockLayout,
        memory: KvMemory,
        secret: bytes,
        clock: Clock,
        faults: Faults,
        report: Callable[[TransferReport], None],
        transports: tuple[str, ...],
        data_host: str,
    ) -> None:
        """`transports` are those that this rank offers to writers; `ValueError` for an unknown one."""
        unknown = sorted(set(transports) - set(TRANSPORTS))
        if unknown:
            raise ValueError(f"unknown transports {unknown}; there are {sorted(TRANSPORTS)}")
        self._clock = clock
        self._faults = faults
        self._unlocked_report = report
        self._report_lock = threading.RLock()
        self._layout = layout
        self._memory = memory
        self._rank = WriterRank(identity, rank, layout, memory, secret)
        self._host_id = host_id()
        self._gate = Gate(self._report)
        self._fence = PushFence(self._report)
        self._connections: dict[bytes, WriterConnection] = {}
        self._checks: queue.SimpleQueue[VerifyOrder | None] = queue.SimpleQueue()
        self._verifier = threading.Thread(
            target=self._verify_all, name=f"{TRANSFER_THREADS}verify", daemon=True
        )
        self._verifier.start()
        target = TargetRank(layout, memory, self._gate, secret, data_host)
        offered = (TRANSPORTS[name].listen(target) for name in transports)
        self._listeners: list[Listener] = [listener for listener in offered if listener is not None]

    def endpoints(self) -> RankEndpoints:
        """How writers reach this rank."""
        return RankEndpoints(
            self._rank.rank,
            self._layout.shard,
            self._host_id,
            tuple(listener.endpoint for listener in self._listeners),
        )

    def handle(self, order: TransferOrder) -> None:
        """Start or do what is ordered; the answers come as reports."""
        match order:
            case PushOrder():
                if self._fence.submit(order):
                    self._connections[order.connection_id].submit(order)
            case StopPush():
                self._fence.stop(order.landing_id)
            case OpenLanding():
                self._gate.open(order)
            case CloseLanding():
                self._gate.close(order.landing_id)
            case VerifyOrder():
                self._checks.put(order)
            case ConnectPeer():
                self._connect(order)
            case ClosePeer():
                connection = self._connections.pop(order.connection_id, None)
                if connection is not None:
                    connection.close()

    def close(self) -> None:
        """End every connection and thread; pushes that still run fail."""
        self._gate.shut()
        for connection in self._connections.values():
            connection.close()
        self._checks.put(None)
        for connection in self._connections.values():
            connection.join()
        self._verifier.join()
        for listener in self._listeners:
            listener.close()

    def _connect(self, order: ConnectPeer) -> None:
        for connection_id in [key for key, each in self._connections.items() if each.has_ended]:
            del self._connections[connection_id]
        self._connections[order.connection_id] = WriterConnection(
            order,
            rank=self._rank,
            host_id=self._host_id,
            fence=self._fence,
            clock=self._clock,
            faults=self._faults,
            report=self._report,
        )

    def _report(self, report: TransferReport) -> None:
        with self._report_lock:
            self._unlocked_report(report)

    def _verify_all(self) -> None:
        checksummer = Checksummer()
        while (order := self._checks.get()) is not None:
            self._faults.at("verify")
            bad = {piece.block_index for piece in order.pieces if not self._is_good(checksummer, piece)}
            self._report(Verified(order.landing_id, tuple(sorted(bad))))

    def _is_good(self, checksummer: Checksummer, piece: PieceCheck) -> bool:
        """Whether the piece has its sum; a piece that this rank cannot hold is bad, for peers may lie."""
        num_blocks = self._memory.num_bytes // self._layout.block_bytes
        if not 0 <= piece.block_id < num_blocks:
            return False
        try:
            runs = piece_runs(self._layout, piece.shard)
        except ValueError:
            return False
        base = piece.block_id * self._layout.block_bytes
        parts = [
            self._memory.buffer[base + run.src_offset : base + run.src_offset + run.num_bytes] for run in runs
        ]
        return checksummer.sum(parts) == piece.checksum


def host_id() -> str:
    """Equal exactly where unix sockets and memory can be shared: one boot, network namespace and user."""
    if not _BOOT_ID.exists():
        return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:32]
    fields = (_BOOT_ID.read_text().strip(), os.stat(_NETWORK_NAMESPACE).st_ino, os.getuid())
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:32]
