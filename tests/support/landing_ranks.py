"""Models of the ranks on both sides of a landing: what they may write, where, and what they report, in order.

A writer rank writes one block at a time, so that everything can happen between two; nothing is ever copied,
a target rank keeps which value was written as which piece of which of its blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.peer_messages import PieceSum
from kvtransfer.transfer_orders import (
    CloseLanding,
    ClosePeer,
    ConnectPeer,
    OpenLanding,
    PushOrder,
    StopPush,
    TransferOrder,
    VerifyOrder,
)
from kvtransfer.transfer_reports import (
    LandingClosed,
    PushDone,
    PushFailed,
    PushStopped,
    TransferReport,
    Verified,
    WriterGone,
)

# A connection id, the writer's rank and a group of layers: what one writer rank has open to one target rank.
Channel = tuple[bytes, int, int]


class LaneModel(NamedTuple):
    """A lane of a writer rank: of every block of the group it writes this piece."""

    target: TargetRank
    piece: Shard
    group: int = 0


@dataclass
class TargetRank:
    """One rank of the decode replica, with its gate."""

    rank: int
    orders: deque[TransferOrder] = field(default_factory=deque)
    reports: deque[TransferReport] = field(default_factory=deque)
    open: set[bytes] = field(default_factory=set)
    closed: set[bytes] = field(default_factory=set)
    admitted: dict[bytes, set[Channel]] = field(default_factory=dict)
    # What was written as a piece of a block of a group of layers.
    memory: dict[tuple[int, int, Shard], int] = field(default_factory=dict)

    def run(self) -> bool:
        """Do one order; False when there is none."""
        if not self.orders:
            return False
        order = self.orders.popleft()
        match order:
            case OpenLanding(landing_id):
                self.open.add(landing_id)
            case CloseLanding(landing_id):
                self.open.discard(landing_id)
                self.closed.add(landing_id)
                channels = sorted(self.admitted.pop(landing_id, set()))
                self.reports.append(LandingClosed(landing_id, tuple(name(channel) for channel in channels)))
            case VerifyOrder(landing_id, pieces, group):
                bad = {
                    check.block_index
                    for check in pieces
                    if self.memory.get((group, check.block_id, check.shard)) != check.checksum
                }
                self.reports.append(Verified(landing_id, tuple(sorted(bad))))
            case _:
                raise AssertionError(order)
        return True

    def leave(self, channel: Channel, writer: ReplicaIdentity) -> None:
        """Note that the channel's other end is closed."""
        for channels in self.admitted.values():
            channels.discard(channel)
        self.reports.append(WriterGone(writer, name(channel)))


@dataclass
class _Running:
    order: PushOrder
    begun: bool = False
    pieces: list[PieceSum] = field(default_factory=list)
    num_written: int = 0


@dataclass
class WriterRank:
    """One rank of the prefill replica, with its fence. `wrote(landing_id, group, block)` is called before a
    block is written, `read(group, block)` returns what is in one of its own. A one-sided writer asks the
    target once per landing, a two-sided one for every block."""

    rank: int
    identity: ReplicaIdentity
    one_sided: bool
    lanes: Sequence[LaneModel]
    wrote: Callable[[bytes, int, int], None]
    read: Callable[[int, int], int]
    orders: deque[TransferOrder] = field(default_factory=deque)
    reports: deque[TransferReport] = field(default_factory=deque)
    queue: deque[_Running] = field(default_factory=deque)
    stopped: set[bytes] = field(default_factory=set)
    connection: bytes = b""
    is_alive: bool = True
    # Stopped by a signal: it does nothing, and its connections stay open.
    is_frozen: bool = False
    # Blocks to come that arrive with a wrong value in every lane.
    num_flips: int = 0

    def handle(self) -> bool:
        """Take one order from the engine core; False when there is none."""
        if not self.orders or self.is_frozen:
            return False
        order = self.orders.popleft()
        match order:
            case ConnectPeer():
                self.connection = order.connection_id
            case ClosePeer(connection_id):
                if connection_id == self.connection:
                    self.disconnect()
            case PushOrder():
                if order.landing_id in self.stopped or order.connection_id != self.connection:
                    self._failed(order, "stopped or disconnected")
                else:
                    self.queue.append(_Running(order))
            case StopPush(landing_id):
                self.stopped.add(landing_id)
                self._drop(landing_id)
                self.reports.append(PushStopped(landing_id))
            case _:
                raise AssertionError(order)
        return True

    def write(self) -> bool:
        """Write the next block of the oldest push, to every lane; False when there is none, or it waits."""
        if not self.queue or self.is_frozen:
            return False
        running = self.queue[0]
        landing_id = running.order.landing_id
        if not running.begun or not self.one_sided:
            lanes = [lane for lane in self._lanes_of(running) if not self._is_admitted(lane, landing_id)]
            if any(landing_id in lane.target.closed for lane in lanes):
                self.fail()
                return True
            if any(landing_id not in lane.target.open for lane in lanes):
                return False  # the order that opens it is on its way to the target
            for lane in lanes if self.one_sided else ():
                lane.target.admitted.setdefault(landing_id, set()).add(self._channel(lane))
            running.begun = True
        self._write_block(running)
        if running.num_written == len(running.order.moves):
            self.queue.popleft()
            order, num_bytes = running.order, 8 * len(running.pieces)
            transport = "shm" if self._lanes_of(running) else ""
            pieces = tuple(running.pieces)
            self.reports.append(
                PushDone(order.push_id, landing_id, pieces, num_bytes, 0.1, 1.0 + self.rank, transport)
            )
        return True

    def fail(self) -> None:
        """Fail the oldest push."""
        if self.queue and not self.is_frozen:
            self._failed(self.queue.popleft().order, "it broke")

    def disconnect(self) -> None:
        """Close the connection: nothing is written over it any more, and each target sees it end."""
        for running in self.queue:
            self._failed(running.order, "its connection was closed")
        self.queue.clear()
        for lane in self.lanes if self.one_sided and self.connection else ():
            lane.target.leave(self._channel(lane), self.identity)
        self.connection = b""

    def die(self) -> None:
        """End the rank: its earlier reports may still arrive; the kernel closes its connections."""
        if self.is_alive:
            self.orders.clear()
            self.queue.clear()
            self.disconnect()
            self.is_alive, self.is_frozen = False, True

    def _write_block(self, running: _Running) -> None:
        move = running.order.moves[running.num_written]
        running.num_written += 1
        flip, self.num_flips = bool(self.num_flips), max(0, self.num_flips - 1)
        group = running.order.group
        value = self.read(group, move.src_block)
        for target, piece, _ in self._lanes_of(running):
            self.wrote(running.order.landing_id, group, move.dst_block)
            target.memory[group, move.dst_block, piece] = -1 if flip else value
            running.pieces.append(PieceSum(move.block_index, target.rank, piece, value))

    def _lanes_of(self, running: _Running) -> list[LaneModel]:
        return [lane for lane in self.lanes if lane.group == running.order.group]

    def _channel(self, lane: LaneModel) -> Channel:
        return self.connection, self.rank, lane.group

    def _is_admitted(self, lane: LaneModel, landing_id: bytes) -> bool:
        return self.one_sided and self._channel(lane) in lane.target.admitted.get(landing_id, set())

    def _drop(self, landing_id: bytes) -> None:
        for running in [item for item in self.queue if item.order.landing_id == landing_id]:
            self.queue.remove(running)
            self._failed(running.order, "its landing was stopped")

    def _failed(self, order: PushOrder, reason: str) -> None:
        self.reports.append(PushFailed(order.push_id, order.landing_id, reason))


def name(channel: Channel) -> bytes:
    """As targets name it in their reports."""
    return channel[0] + b"/%d/%d" % channel[1:]
