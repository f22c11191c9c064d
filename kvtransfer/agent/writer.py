"""A writer rank's connection to a peer: opens and measures its lanes, then pushes on its own thread.

ConnectPeer -> connecting -> open -> closed    reports PeerConnected or PeerConnectFailed, or PeerLost
                              |  ^
                              v  | a lane was lost: the best path left, PeerConnected again
PushOrder ---> queue ---> batch by batch over all lanes -> PushDone or PushFailed
                 ^            |
                 +--- park ---+ a higher class waits for the thread, or a lane was lost
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtransfer.agent.lanes import OpenLane, Paths, WriterContext
from kvtransfer.agent.qos import ClassQueue, TakeTurn, TrafficGovernor
from kvtransfer.errors import PathError, PeerGoneError, PushStoppedError, TransferError
from kvtransfer.peer_messages import PieceSum
from kvtransfer.protocol.fence import PushFence
from kvtransfer.transfer_orders import BlockMove, ConnectPeer, PushOrder
from kvtransfer.transfer_reports import (
    LanePath,
    PeerConnected,
    PeerConnectFailed,
    PeerLost,
    PushDone,
    PushFailed,
    TransferReport,
)

_log = logging.getLogger(__name__)


@dataclass
class _Push:
    """A push and how far it is: the first `num_moved` moves are written, and visible when it is parked."""

    order: PushOrder
    num_moved: int = 0
    pieces: list[PieceSum] = field(default_factory=list)
    started_at: float | None = None
    num_failures: int = 0

    def start_over(self) -> None:
        """Repeat it, over whatever carries its lanes then.

        The source blocks stay as they are until the push is done; the target's belong to its landing, and
        they are read only after a manifest has announced them: so the same bytes go to the same place once
        more. Nor can the first attempt come later, when the blocks have another use: a one-sided channel is
        drained and closed before the push is repeated, and what a two-sided one left on the way is dropped
        by the target once the landing is closed.
        """
        self.num_moved = 0
        self.pieces.clear()


class WriterConnection:
    """One `ConnectPeer`, from a thread's start to its end."""

    def __init__(
        self,
        order: ConnectPeer,
        *,
        context: WriterContext,
        fence: PushFence,
        governor: TrafficGovernor,
        report: Callable[[TransferReport], None],
    ) -> None:
        self._order = order
        self._clock = context.clock
        self._fence = fence
        self._governor = governor
        self._report = report
        self._queue: ClassQueue[_Push] = ClassQueue()
        self._paths = Paths(order, context, lambda _: self._queue.wake())
        self._lanes: list[OpenLane] = []
        # What a block of each group of layers moves over all its lanes.
        self._block_bytes: Counter[int] = Counter()
        for lane in order.lanes:
            self._block_bytes[lane.group] += context.ranks[lane.group].pool.piece_bytes(lane.piece)
        self._max_failures = context.settings.error_budget * max(1, len(order.transports))
        # The results of `_seek`: the lane as it was, and its better path.
        self._better: queue.SimpleQueue[tuple[OpenLane, OpenLane]] = queue.SimpleQueue()
        self._seeker: threading.Thread | None = None
        self._closing = False
        fence.add_connection(order.connection_id)
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def submit(self, order: PushOrder) -> None:
        """Queue a push that the fence has accepted. The caller wakes the governor."""
        self._queue.put(order.traffic, _Push(order))

    def close(self) -> None:
        """End soon: a running push stops before its next batch and queued ones fail. The caller wakes the
        governor."""
        self._closing = True
        self._paths.interrupt()
        self._fence.remove_connection(self._order.connection_id, "its connection was closed")
        self._queue.wake()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end after `close`; nothing is mapped or connected after it."""
        self._thread.join()

    def _run(self) -> None:
        connection_id = self._order.connection_id
        ended: TransferReport = PeerLost(connection_id, "its thread failed")
        reason = "its connection was lost"
        try:
            self._open_all()
            reason = self._work()
            ended = PeerLost(connection_id, reason)
        except PathError as error:
            reason = str(error)
            ended = PeerConnectFailed(connection_id, reason)
        finally:
            self._fence.remove_connection(connection_id, reason)
            self._paths.interrupt()
            if self._seeker is not None:
                self._seeker.join()
            self._paths.close_all()
            if not self._closing:
                self._report(ended)

    def _work(self) -> str:
        """Push until no path is left or it is closed; returns why. A lost channel wakes it."""
        while not self._closing:
            push = self._queue.get()
            has_ended = push is not None and self._fence.start(push.order) and self._advance(push)
            self._take_better()
            try:
                self._reopen_lost()
            except PathError as error:
                return str(error)
            if has_ended:
                self._seek_better()
        return "closed"

    # ----------------------------------------------------------------------------------------- lanes

    def _open_all(self) -> None:
        for lane in self._order.lanes:
            self._lanes.append(self._paths.open(lane, self._order.transports))
        self._report_paths()

    def _reopen_lost(self) -> None:
        """Open the best path left for every lane whose channel is lost. `PathError` when there is none."""
        lost = [index for index, opened in enumerate(self._lanes) if opened.channel.lost]
        if self._closing or not lost:
            return
        for index in lost:
            opened = self._lanes[index]
            reason = f"{opened.path.transport} was lost: {opened.channel.lost}"
            _log.warning("%s rank %d: %s", self._order.peer.replica_id, opened.path.peer_rank, reason)
            self._paths.note_lost(opened)
            self._paths.close(opened.channel)
            try:
                self._lanes[index] = self._paths.open(opened.lane, self._order.transports)
            except PathError as error:
                raise PathError(f"{reason}; {error}") from error
        self._report_paths()

    def _seek_better(self) -> None:
        """Try the failed transports again that are preferred to the one a lane uses now; on a thread of its
        own, for pushes must not wait for a peer that does not answer."""
        wanted = [(opened, names) for opened in self._lanes if (names := self._paths.better(opened))]
        if wanted and not self._closing and (self._seeker is None or not self._seeker.is_alive()):
            self._seeker = threading.Thread(target=self._seek, args=(wanted,), name="kv-seek", daemon=True)
            self._seeker.start()

    def _seek(self, wanted: Sequence[tuple[OpenLane, Sequence[str]]]) -> None:
        for opened, names in wanted:
            try:
                self._better.put((opened, self._paths.open(opened.lane, names)))
            except PathError as error:
                _log.info("rank %d stays on %s: %s", opened.path.peer_rank, opened.path.transport, error)
        self._queue.wake()

    def _take_better(self) -> None:
        """Move lanes to the better paths that were found, between two pushes."""
        has_changed = False
        while not self._better.empty():
            old, better = self._better.get()
            if old in self._lanes and not better.channel.lost:
                self._lanes[self._lanes.index(old)] = better
                self._paths.close(old.channel)
                has_changed = True
            else:
                self._paths.close(better.channel)
        if has_changed:
            self._report_paths()

    def _report_paths(self) -> None:
        """Report the path of every lane; lanes of several groups to a rank over one transport are one."""
        paths: dict[tuple[int, str], LanePath] = {}
        for opened in self._lanes:
            paths.setdefault((opened.path.peer_rank, opened.path.transport), opened.path)
        self._report(PeerConnected(self._order.connection_id, tuple(paths.values())))

    # --------------------------------------------------------------------------------------- pushing

    def _advance(self, push: _Push) -> bool:
        """Push until it is done or has failed (True), or has to be parked."""
        order = push.order
        try:
            is_done = self._move(push)
        except TransferError as error:
            for opened in self._lanes_of(order):
                opened.channel.drain()
            push.num_failures += 1
            # Repeated when a lane was lost. One that breaks all that carries it is no use.
            if isinstance(error, PeerGoneError) and push.num_failures < self._max_failures:
                push.start_over()
                self._park(push)
                return False
            self._fence.end(order, PushFailed(order.push_id, order.landing_id, str(error)))
            return True
        if not is_done:
            self._park(push)
            return False
        if order.moves:
            for opened in self._lanes_of(order):
                self._paths.note_success(opened)
        self._fence.end(order, self._done(push))
        return True

    def _park(self, push: _Push) -> None:
        if self._fence.park(push.order):
            self._queue.put_first(push.order.traffic, push)

    def _move(self, push: _Push) -> bool:
        """Write the rest of the push. True when all is visible in the target's memory; False when it gives
        way to a higher class that waits for this thread: then the part that was written is visible."""
        order = push.order
        if push.started_at is None:
            push.started_at = self._clock.now()
        lanes = self._lanes_of(order)
        for opened in lanes:
            with _marking_lost(opened):
                opened.channel.begin(order.landing_id, lambda: self._is_stopped(order))
        with self._governor.flow(order.traffic) as take_turn:
            self._write(push, lanes, take_turn)
            for opened in lanes:
                with _marking_lost(opened):
                    opened.channel.flush(order.landing_id, lambda: self._is_stopped(order))
        return push.num_moved == len(order.moves)

    def _write(self, push: _Push, lanes: Sequence[OpenLane], take_turn: TakeTurn) -> None:
        """Write batch after batch, until the end or until a higher class waits for this thread."""
        order = push.order
        if not lanes:
            push.num_moved = len(order.moves)  # no lanes: no bytes
        block_bytes = self._block_bytes[order.group]
        path_gb_s = min((opened.path.gb_s for opened in lanes), default=0.0)
        batch_bytes = self._governor.batch_bytes(order.traffic, path_gb_s)
        batch_moves = max(1, batch_bytes // max(1, block_bytes))
        while push.num_moved < len(order.moves):
            batch = order.moves[push.num_moved : push.num_moved + batch_moves]
            may_move = take_turn(len(batch) * block_bytes, lambda: self._gives_way(order))
            if self._is_stopped(order):
                raise PushStoppedError("stopped on request")
            if not may_move:
                return
            for opened in lanes:
                push.pieces += self._write_lane(opened, order, batch)
            push.num_moved += len(batch)

    def _write_lane(self, opened: OpenLane, order: PushOrder, batch: tuple[BlockMove, ...]) -> list[PieceSum]:
        lane = opened.lane
        with _marking_lost(opened):
            sums = opened.channel.write(order.landing_id, batch, lambda: self._is_stopped(order))
        return [
            PieceSum(move.block_index, lane.target.rank, lane.piece, checksum)
            for move, checksum in zip(batch, sums, strict=True)
        ]

    def _lanes_of(self, order: PushOrder) -> list[OpenLane]:
        """Return the lanes of the order's group of layers."""
        return [opened for opened in self._lanes if opened.lane.group == order.group]

    def _is_stopped(self, order: PushOrder) -> bool:
        return self._closing or self._fence.is_stopped(order.landing_id)

    def _gives_way(self, order: PushOrder) -> bool:
        return self._is_stopped(order) or self._queue.has_above(order.traffic)

    def _done(self, push: _Push) -> PushDone:
        order = push.order
        now = self._clock.now()
        started_at = now if push.started_at is None else push.started_at
        return PushDone(
            order.push_id,
            order.landing_id,
            tuple(push.pieces),
            len(order.moves) * self._block_bytes[order.group],
            now - started_at,
            started_at,
            "+".join(sorted({opened.path.transport for opened in self._lanes_of(order)})),
            order.traffic,
        )


@contextmanager
def _marking_lost(opened: OpenLane) -> Iterator[None]:
    """Mark a channel that reports its peer gone as lost, even when it has not noticed the loss itself yet."""
    try:
        yield
    except PeerGoneError as error:
        opened.channel.interrupt(str(error))
        raise
