"""A writer rank's connection to a peer: opens and measures the best path, then pushes on its own thread.

ConnectPeer -> connecting -> open -> closed            reports PeerConnected (one per peer rank)
                   |          |                        or PeerConnectFailed, or PeerLost
PushOrder  --------+--> queue +--> copy and sum block by block -> PushDone or PushFailed
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.checksum import Checksummer
from kvtransfer.clock import Clock
from kvtransfer.errors import PathError, PushStoppedError, TransferError
from kvtransfer.faults import Faults
from kvtransfer.fence import PushFence
from kvtransfer.layout import Run, intersect, piece_runs
from kvtransfer.memory import SCRATCH_BYTES, scratch_offset
from kvtransfer.messages import (
    BlockMove,
    ConnectPeer,
    PeerConnected,
    PeerConnectFailed,
    PeerLost,
    PieceSum,
    PushDone,
    PushFailed,
    PushOrder,
    RankEndpoints,
    Shard,
    TransferReport,
)
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.base import Channel, Measured, WriterRank

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Lane:
    """The way to one peer rank: what of a block goes there."""

    channel: Channel
    shard: Shard
    runs: tuple[Run, ...]


class WriterConnection:
    """One `ConnectPeer`, from a thread's start to its end."""

    def __init__(
        self,
        order: ConnectPeer,
        *,
        rank: WriterRank,
        host_id: str,
        fence: PushFence,
        clock: Clock,
        faults: Faults,
        report: Callable[[TransferReport], None],
    ) -> None:
        self._order = order
        self._rank = rank
        self._host_id = host_id
        self._fence = fence
        self._clock = clock
        self._faults = faults
        self._report = report
        self._checksummer = Checksummer()
        self._queue: queue.SimpleQueue[PushOrder | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._lanes: list[_Lane] = []
        self._closing = False
        fence.add_connection(order.connection_id)
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def submit(self, order: PushOrder) -> None:
        """Queue a push that the fence has accepted."""
        self._queue.put(order)

    def close(self) -> None:
        """End soon: a running push stops before its next block and queued ones fail."""
        with self._lock:
            self._closing = True
            for channel in self._channels:
                channel.interrupt()
        self._fence.remove_connection(self._order.connection_id, "its connection was closed")
        self._queue.put(None)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end after `close`; nothing is mapped or connected after it."""
        self._thread.join()

    def _run(self) -> None:
        connection_id = self._order.connection_id
        ended: TransferReport = PeerLost(connection_id, "its thread failed")
        try:
            self._connect()
            ended = PeerLost(connection_id, self._work())
        except TransferError as error:
            ended = PeerConnectFailed(connection_id, str(error))
        finally:
            self._fence.remove_connection(connection_id, "its connection was lost")
            for channel in self._channels:
                channel.close()
            if not self._closing:
                self._report(ended)

    # ------------------------------------------------------------------------------------ connecting

    def _connect(self) -> None:
        """Open a lane to every peer rank that holds part of our shard; `PathError` names what was tried."""
        reports: list[PeerConnected] = []
        for target in self._order.ranks:
            shard = intersect(self._rank.layout.shard, target.shard)
            if shard is None:
                continue
            channel, measured = self._open_best(target)
            self._lanes.append(_Lane(channel, shard, tuple(piece_runs(self._rank.layout, shard))))
            reports.append(
                PeerConnected(
                    self._order.connection_id,
                    target.rank,
                    channel.transport,
                    measured.gb_s,
                    measured.latency_us,
                )
            )
        if not reports:
            raise PathError("no rank of the peer holds any of this rank's layers and heads")
        for report in reports:
            self._report(report)

    def _open_best(self, target: RankEndpoints) -> tuple[Channel, Measured]:
        """The first transport that connects and is fast enough, with its measure."""
        addresses = {endpoint.transport: endpoint.address for endpoint in target.endpoints}
        tried: list[str] = []
        for name in self._order.transports:
            try:
                channel, measured = self._open(name, addresses.get(name), target)
            except TransferError as error:
                tried.append(f"{name}: {error}")
                continue
            _log.info(
                "rank %d -> %s rank %d over %s: %.2f GB/s, %.0f us%s",
                self._rank.rank,
                self._order.peer.replica_id,
                target.rank,
                name,
                measured.gb_s,
                measured.latency_us,
                f" (instead of {'; '.join(tried)})" if tried else "",
            )
            return channel, measured
        raise PathError(f"no path to rank {target.rank}: {'; '.join(tried) or 'no transport allowed'}")

    def _open(self, name: str, address: str | None, target: RankEndpoints) -> tuple[Channel, Measured]:
        transport = TRANSPORTS.get(name)
        if transport is None:
            raise PathError("no such transport")
        if address is None:
            raise PathError("not offered by the peer")
        if transport.same_host and target.host_id != self._host_id:
            raise PathError("another host")
        channel = transport.connect(
            self._rank, target, address, self._order.connection_id, lambda _: self._queue.put(None)
        )
        with self._lock:
            self._channels.append(channel)
            if self._closing:
                channel.interrupt()
        memory = self._rank.memory
        start = scratch_offset(memory.num_bytes)
        try:
            measured = channel.measure(self._clock, memory.whole[start : start + SCRATCH_BYTES])
            if measured.gb_s < self._order.min_gb_s:
                raise PathError(f"{measured.gb_s:.3f} GB/s is below the floor of {self._order.min_gb_s} GB/s")
        except TransferError:
            with self._lock:
                self._channels.remove(channel)
            channel.close()
            raise
        return channel, measured

    # --------------------------------------------------------------------------------------- pushing

    def _work(self) -> str:
        """Push until a channel is lost or closed; returns why. A lost channel wakes it with None."""
        while True:
            order = self._queue.get()
            if order is not None and self._fence.start(order):
                self._fence.end(order, self._push(order))
            for lane in self._lanes:
                if lane.channel.lost:
                    return lane.channel.lost

    def _push(self, order: PushOrder) -> PushDone | PushFailed:
        started_at = self._clock.now()
        pieces: list[PieceSum] = []

        def stopped() -> bool:
            return self._closing or self._fence.is_stopped(order.landing_id)

        try:
            self._check_blocks(order)
            for lane in self._lanes:
                lane.channel.begin(order.landing_id, stopped)
            for move in order.moves:
                if stopped():
                    raise PushStoppedError("stopped on request")
                pieces.extend(self._push_block(order.landing_id, move, stopped))
            for lane in self._lanes:
                lane.channel.flush(order.landing_id, stopped)
        except TransferError as error:
            return PushFailed(order.push_id, order.landing_id, str(error))
        return PushDone(
            order.push_id,
            order.landing_id,
            tuple(pieces),
            len(order.moves) * sum(lane.channel.num_bytes for lane in self._lanes),
            self._clock.now() - started_at,
            started_at,
            "+".join(sorted({lane.channel.transport for lane in self._lanes})),
        )

    def _check_blocks(self, order: PushOrder) -> None:
        num_blocks = self._rank.memory.num_bytes // self._rank.layout.block_bytes
        for move in order.moves:
            if not 0 <= move.src_block < num_blocks:
                raise PathError(f"block {move.src_block} is outside this rank's pool of {num_blocks} blocks")

    def _push_block(self, landing_id: bytes, move: BlockMove, stopped: Callable[[], bool]) -> list[PieceSum]:
        """Write one block's pieces, then sum them where they lie here (they are in the cache now)."""
        block_bytes = self._rank.layout.block_bytes
        start = move.src_block * block_bytes
        block = self._rank.memory.buffer[start : start + block_bytes]
        self._faults.at("push.copy")
        corrupt = self._faults.at("push.corrupt")
        for lane in self._lanes:
            lane.channel.write(
                landing_id,
                move.dst_block,
                _with_flipped_bit(block, lane.runs[0].src_offset) if corrupt else block,
                self._half,
                stopped,
            )
        return [
            PieceSum(move.block_index, lane.shard, self._checksummer.sum(_parts(block, lane.runs)))
            for lane in self._lanes
        ]

    def _half(self) -> None:
        self._faults.at("push.half")


def _parts(block: memoryview, runs: tuple[Run, ...]) -> list[memoryview]:
    return [block[run.src_offset : run.src_offset + run.num_bytes] for run in runs]


def _with_flipped_bit(block: memoryview, offset: int) -> memoryview:
    copy = bytearray(block)
    copy[offset] ^= 1
    return memoryview(copy)
