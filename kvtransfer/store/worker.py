"""The store worker of a rank: copies blocks to and from the node's arena, each copy with its checksum.

    AttachStore -> connect, map -> StoreAttached      the owner's end -> StoreAttached(b"", why)
    StoreGet ----> queue --+
    StorePut ----> queue --+--> batch by batch on one thread -> StoreGetDone, StorePutDone

Gets precede puts, even the rest of one that is under way. Orders for a connection that has ended are answered
with an error. After an answer with an error, nothing of the order is written any more.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.agent.agent import TRANSFER_THREADS
from kvtransfer.agent.qos import TrafficGovernor
from kvtransfer.blocks.pool import RecordPool
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.errors import StoreError, TransferError
from kvtransfer.rpc.handshake import receive_exactly
from kvtransfer.rpc.listener import shut_down
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.store_orders import (
    AttachStore,
    StoreAttached,
    StoreGet,
    StoreOrder,
    StorePut,
    StoreReport,
)
from kvtransfer.store.owner_connection import MappedArena, attach
from kvtransfer.store.record_copies import CopyWork, GetWork, PutWork
from kvtransfer.transfer_orders import TrafficClass


@dataclass(frozen=True)
class _Lost:
    """The connection of this number has ended."""

    connection: int
    reason: str


class _OrderQueue:
    """The orders that wait for the thread: changes of the connection first, then gets, then puts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent: deque[AttachStore | _Lost] = deque()
        self._works: dict[TrafficClass, deque[CopyWork]] = {"prefetch": deque(), "write_back": deque()}
        self._is_closed = False

    def put(self, order: AttachStore | _Lost | CopyWork) -> None:
        with self._changed:
            if isinstance(order, CopyWork):
                self._works[order.traffic].append(order)
            else:
                self._urgent.append(order)
            self._changed.notify_all()

    def put_first(self, work: CopyWork) -> None:
        """Put back an order that yielded, to continue as soon as it may."""
        with self._changed:
            self._works[work.traffic].appendleft(work)

    def get(self) -> AttachStore | _Lost | CopyWork | None:
        """Take the most urgent order; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._urgent or any(self._works.values()))
            if self._is_closed:
                return None
            if self._urgent:
                return self._urgent.popleft()
            return next(works for works in self._works.values() if works).popleft()

    def drop(self) -> list[CopyWork]:
        """Take out all waiting copies."""
        with self._changed:
            dropped = [work for works in self._works.values() for work in works]
            for works in self._works.values():
                works.clear()
            return dropped

    def has_before(self, work: CopyWork) -> bool:
        """Whether something more urgent waits."""
        with self._changed:
            if self._is_closed or self._urgent:
                return True
            return work.traffic == "write_back" and bool(self._works["prefetch"])

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class StoreWorker:
    """Executes the store orders of one rank. `handle` never waits; `report` is called on the worker's
    thread."""

    def __init__(
        self,
        pools: Sequence[RecordPool],
        rank: int,
        governor: TrafficGovernor,
        trust: Trust,
        faults: Faults,
        clock: Clock,
        report: Callable[[StoreReport], None],
    ) -> None:
        """The pools of each group of layers stay the caller's, and outlive the worker."""
        self._pools = tuple(pools)
        self._rank = rank
        self._governor = governor
        self._trust = trust
        self._faults = faults
        self._clock = clock
        self._report = report
        self._orders = _OrderQueue()
        self._arena: MappedArena | None = None
        self._sock: socket.socket | None = None
        self._watcher: threading.Thread | None = None
        self._num_connections = 0
        self._thread = threading.Thread(target=self._run, name=f"{TRANSFER_THREADS}store", daemon=True)
        self._thread.start()

    def handle(self, order: StoreOrder) -> None:
        """Queue an order; its answer is a report."""
        match order:
            case StorePut():
                self._orders.put(PutWork(order))
            case StoreGet():
                self._orders.put(GetWork(order))
            case AttachStore():
                self._orders.put(order)
        self._governor.wake()

    def close(self) -> None:
        """End the thread, the connection and the mapping. Waiting orders are not answered any more."""
        self._orders.close()
        self._governor.wake()
        self._thread.join()

    # ---------------------------------------------------------------------------------- on the thread

    def _run(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                match order:
                    case AttachStore():
                        self._attach(order)
                    case _Lost():
                        self._detach(order)
                    case CopyWork():
                        self._advance(order)
        finally:
            self._unmap()
            self._disconnect()

    def _attach(self, order: AttachStore) -> None:
        """Connect and map the arena. Earlier orders belong to the earlier connection, and are dropped."""
        self._drop_all("the store is attached again")
        self._disconnect()
        try:
            sock, arena = attach(order, self._rank, self._trust, self._arena)
        except TransferError as error:
            self._report(StoreAttached(b"", str(error)))
            return
        if arena is not self._arena:
            self._unmap()
            for pool in self._pools:
                pool.attach(arena.region)
            self._arena = arena
        self._sock = sock
        self._num_connections += 1
        self._watcher = threading.Thread(
            target=self._watch, args=(sock, self._num_connections), name=f"{TRANSFER_THREADS}store-watch"
        )
        self._watcher.daemon = True
        self._watcher.start()
        self._report(StoreAttached(arena.id))

    def _detach(self, lost: _Lost) -> None:
        if lost.connection != self._num_connections or self._sock is None:
            return  # another one has been made since
        self._drop_all(lost.reason)
        self._disconnect()
        self._report(StoreAttached(b"", lost.reason))

    def _drop_all(self, reason: str) -> None:
        for work in self._orders.drop():
            self._report(work.failed(reason))

    def _disconnect(self) -> None:
        """Close the connection, which tells the owner that nothing more is written; keep the mapping."""
        if self._sock is not None and self._watcher is not None:
            shut_down(self._sock)
            self._watcher.join()
            self._sock.close()
            self._sock = None

    def _unmap(self) -> None:
        if self._arena is not None:
            for pool in self._pools:
                pool.detach(self._arena.region)
            self._arena.close()
            self._arena = None

    def _watch(self, sock: socket.socket, connection: int) -> None:
        """Wait for the end of the connection: the owner sends nothing more on it."""
        try:
            receive_exactly(sock, 1)
            reason = "the owner broke the protocol"
        except TransferError as error:
            reason = f"the owner was lost: {error}"
        self._orders.put(_Lost(connection, reason))
        self._governor.wake()

    # --------------------------------------------------------------------------------------- copying

    def _advance(self, work: CopyWork) -> None:
        """Copy until the order is done, or has to yield."""
        try:
            if self._sock is None or self._arena is None:
                raise StoreError("no store is attached")
            work.start(self._pools, self._arena, self._clock.now())
            is_done = self._copy(work, self._arena)
        except (TransferError, IndexError, ValueError) as error:
            self._report(work.failed(str(error)))
            return
        if is_done:
            self._report(work.done(self._clock.now()))
        else:
            self._orders.put_first(work)

    def _copy(self, work: CopyWork, arena: MappedArena) -> bool:
        limit = 1 if self._faults.armed else self._governor.batch_bytes(work.traffic)
        with self._governor.flow(work.traffic) as take_turn:
            while batch := work.next(limit):
                if not take_turn(batch.num_bytes, lambda: self._orders.has_before(work)):
                    return False
                work.copy(batch, self._pools, arena, self._faults)
        return True
