"""The store worker of a rank: copies blocks to and from the node's arena, each copy with its checksum.

    AttachStore -> connect, map -> StoreAttached      the owner's end -> StoreAttached(b"", why)
    StoreGet ----> queue --+
    StorePut ----> queue --+--> batch by batch on one thread -> StoreGetDone, StorePutDone

Gets precede puts, even the rest of one that is under way. Orders for a connection that has ended are answered
with an error. After an answer with an error, nothing of the order is written any more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from kvtransfer.agent.agent import TRANSFER_THREADS
from kvtransfer.agent.qos import TrafficGovernor
from kvtransfer.blocks.layout import intersect
from kvtransfer.blocks.pool import KvPool, map_shared, populate_read
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.os_errors import os_reason
from kvtransfer.errors import PeerGoneError, StoreError, TransferError, WireError
from kvtransfer.messages import Shard, TrafficClass
from kvtransfer.rpc.handshake import (
    HANDSHAKE_TIMEOUT_S,
    prove_as_client,
    receive_exactly,
    receive_frame,
    send_frame,
)
from kvtransfer.rpc.listener import shut_down
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages import (
    FROM_OWNER_CODEC,
    HEADER_BYTES,
    STORE_PROTOCOL,
    TO_OWNER_CODEC,
    ArenaGrant,
    AttachStore,
    RankHello,
    StoreAttached,
    StoreGet,
    StoreGetDone,
    StoreOrder,
    StorePut,
    StorePutDone,
    StoreRead,
    StoreReport,
    expect,
)


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
        pool: KvPool,
        rank: int,
        governor: TrafficGovernor,
        trust: Trust,
        faults: Faults,
        clock: Clock,
        report: Callable[[StoreReport], None],
    ) -> None:
        """The pool stays the caller's, and outlives the worker."""
        self._pool = pool
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
            self._pool.attach(arena.region)
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
            return  # another one was made meanwhile
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
            self._pool.detach(self._arena.region)
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
            work.start(self._pool, self._arena, self._clock.now())
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
                work.copy(batch, self._pool, arena, self._faults)
        return True


# ----------------------------------------------------------------------------------------------
# The connection to the node's owner, and the arena that is mapped from it.
#
# The connection stays open for as long as the rank may write into the arena: its end proves to the owner that
# nothing more is written. When the owner ends first, the mapping is kept and offered to the next owner.

_FD_MARK = b"F"
# The mapping remembers in units of this size what it has mapped; records start at multiples of it.
_MAPPED_BYTES = 64 << 10


class MappedArena:
    """An owner's arena, mapped here. `region` is its bytes, `fd` the descriptor, kept for another owner."""

    def __init__(self, arena: bytes, num_bytes: int, fd: int) -> None:
        """Takes over the descriptor. `StoreError` when it is not such an arena, or cannot be mapped."""
        self.id = arena
        self.num_bytes = num_bytes
        self.fd = fd
        try:
            if not 0 < num_bytes <= os.fstat(fd).st_size:
                raise StoreError(f"the descriptor is not an arena of {num_bytes} bytes")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise StoreError("the arena could shrink: a write to it would end this process")
            self._mapping: mmap.mmap = map_shared(fd, num_bytes)
        except OSError as error:
            os.close(fd)
            raise StoreError(f"the arena cannot be mapped: {os_reason(error)}") from error
        except StoreError:
            os.close(fd)
            raise
        self.region = ByteRegion(memoryview(self._mapping))
        # For each unit of `_MAPPED_BYTES`: whether this process has its pages mapped.
        self._is_mapped = np.zeros(-(-num_bytes // _MAPPED_BYTES), dtype=np.bool_)

    def expect(self, offset: int, num_bytes: int) -> None:
        """Map the pages of this range, which will be read now, unless that was done before: where pages are
        small, the kernel takes longer to find them mapped than a copy takes."""
        is_mapped = self._is_mapped[offset // _MAPPED_BYTES : -(-(offset + num_bytes) // _MAPPED_BYTES)]
        if not is_mapped.all():
            populate_read(self._mapping, offset, num_bytes)
            is_mapped[:] = True

    def close(self) -> None:
        """Unmap the arena; `region` must not be used any more."""
        self.region = ByteRegion(memoryview(bytearray()))
        self._mapping.close()
        os.close(self.fd)


def attach(
    order: AttachStore, rank: int, trust: Trust, earlier: MappedArena | None
) -> tuple[socket.socket, MappedArena]:
    """Connect to the owner; return the open connection and its arena, which is `earlier` if the owner adopted
    that one. `TransferError` says why that failed; then `earlier` is unchanged."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock.connect(f"\0{order.address}")
        arena = _map_arena(sock, order, rank, trust, earlier)
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        raise PeerGoneError(f"the owner at {order.address} cannot be reached: {error}") from error
    except TransferError:
        sock.close()
        raise
    return sock, arena


def _map_arena(
    sock: socket.socket, order: AttachStore, rank: int, trust: Trust, earlier: MappedArena | None
) -> MappedArena:
    prove_as_client(sock, trust, f"rank {rank} of {order.session.hex()[:8]}")
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    hello = RankHello(STORE_PROTOCOL, order.session, rank, earlier.id if earlier else b"")
    send_frame(sock, TO_OWNER_CODEC.encode(hello))
    if earlier is not None:
        socket.send_fds(sock, [_FD_MARK], [earlier.fd])
    grant = expect(FROM_OWNER_CODEC.decode(receive_frame(sock)), ArenaGrant)
    if grant.is_yours:
        if earlier is None or (grant.arena, grant.num_bytes) != (earlier.id, earlier.num_bytes):
            raise WireError("the owner names an arena that was not offered")
        return earlier
    return MappedArena(grant.arena, grant.num_bytes, _receive_descriptor(sock))


def _receive_descriptor(sock: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(sock, len(_FD_MARK), 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise WireError("the owner sent no descriptor")
    return descriptors[0]


# ----------------------------------------------------------------------------------------------
# The copies of one order between the blocks of the pool and the records of the arena, batch by batch.
#
# Everything that an order names is checked before its first byte: an owner or an engine core may be wrong.


class CopyBatch(NamedTuple):
    """The copies between two requests to the traffic governor."""

    # Positions of the copies in the order.
    positions: Sequence[int]
    num_bytes: int


class CopyWork(ABC):
    """An order and its progress. `traffic` is the class of its copies."""

    traffic: ClassVar[TrafficClass]

    def __init__(self) -> None:
        self._started_at: float | None = None
        self._num_bytes = 0

    def start(self, pool: KvPool, arena: MappedArena, now: float) -> None:
        """Begin or continue the order. `StoreError` or `IndexError` when it does not fit the pool or the
        arena."""
        if self._started_at is None:
            self._check(pool, arena)
            self._started_at = now

    @abstractmethod
    def next(self, limit_bytes: int) -> CopyBatch | None:
        """Return the next copies, of at most so many bytes if more than one; None: all are done."""

    @abstractmethod
    def copy(self, batch: CopyBatch, pool: KvPool, arena: MappedArena, faults: Faults) -> None:
        """Copy a batch."""

    @abstractmethod
    def done(self, now: float) -> StorePutDone | StoreGetDone:
        """Return the answer when all is copied."""

    @abstractmethod
    def failed(self, reason: str) -> StorePutDone | StoreGetDone:
        """Return the answer when the order is given up."""

    @abstractmethod
    def _check(self, pool: KvPool, arena: MappedArena) -> None:
        """See `start`."""

    def _seconds(self, now: float) -> float:
        return 0.0 if self._started_at is None else now - self._started_at


class PutWork(CopyWork):
    """Copies whole blocks into records."""

    traffic: ClassVar[TrafficClass] = "write_back"

    def __init__(self, order: StorePut) -> None:
        super().__init__()
        self._order = order
        self._block_bytes = 0
        self._sums: list[int] = []

    def next(self, limit_bytes: int) -> CopyBatch | None:
        start = len(self._sums)
        count = min(max(1, limit_bytes // self._block_bytes), len(self._order.copies) - start)
        return CopyBatch(range(start, start + count), count * self._block_bytes) if count else None

    def copy(self, batch: CopyBatch, pool: KvPool, arena: MappedArena, faults: Faults) -> None:
        faults.at("store.copy.put")
        copies = [self._order.copies[position] for position in batch.positions]
        offsets = [copy.offset + HEADER_BYTES for copy in copies]
        self._sums += pool.store([copy.block_id for copy in copies], arena.region, offsets)
        self._num_bytes += batch.num_bytes
        if faults.at("store.corrupt.put"):
            arena.region.bytes[offsets[0]] ^= 1

    def done(self, now: float) -> StorePutDone:
        return StorePutDone(self._order.number, tuple(self._sums), self._num_bytes, self._seconds(now))

    def failed(self, reason: str) -> StorePutDone:
        return StorePutDone(self._order.number, (), 0, 0.0, reason)

    def _check(self, pool: KvPool, arena: MappedArena) -> None:
        self._block_bytes = pool.layout.block_bytes
        _check_arena(self._order.arena, arena)
        pool.check_blocks([copy.block_id for copy in self._order.copies])
        for copy in self._order.copies:
            _check_record(copy.offset, self._block_bytes, arena)


class GetWork(CopyWork):
    """Copies pieces of blocks from records, in batches of records of the same shape."""

    traffic: ClassVar[TrafficClass] = "prefetch"

    def __init__(self, order: StoreGet) -> None:
        super().__init__()
        self._order = order
        shapes: dict[tuple[Shard, Shard], list[int]] = {}
        for position, read in enumerate(order.reads):
            shapes.setdefault((read.shard, read.piece), []).append(position)
        self._groups = list(shapes.values())
        # Of the first group, copied already.
        self._num_done = 0
        self._bad: list[int] = []

    def next(self, limit_bytes: int) -> CopyBatch | None:
        if not self._groups:
            return None
        group = self._groups[0]
        num_bytes = self._order.reads[group[0]].num_bytes
        positions = group[self._num_done : self._num_done + max(1, limit_bytes // num_bytes)]
        return CopyBatch(positions, len(positions) * num_bytes)

    def copy(self, batch: CopyBatch, pool: KvPool, arena: MappedArena, faults: Faults) -> None:
        faults.at("store.copy.get")
        reads = [self._order.reads[position] for position in batch.positions]
        for read in reads:
            arena.expect(read.offset, HEADER_BYTES + read.num_bytes)
        sums = pool.load(
            [read.block_id for read in reads],
            reads[0].piece,
            arena.region,
            [read.offset + HEADER_BYTES for read in reads],
            reads[0].shard,
        )
        compared = zip(batch.positions, reads, sums, strict=True)
        self._bad += [position for position, read, total in compared if total != read.checksum]
        self._num_bytes += batch.num_bytes
        self._num_done += len(batch.positions)
        if self._num_done == len(self._groups[0]):
            del self._groups[0]
            self._num_done = 0

    def done(self, now: float) -> StoreGetDone:
        return StoreGetDone(self._order.number, tuple(sorted(self._bad)), self._num_bytes, self._seconds(now))

    def failed(self, reason: str) -> StoreGetDone:
        return StoreGetDone(self._order.number, tuple(range(len(self._order.reads))), 0, 0.0, reason)

    def _check(self, pool: KvPool, arena: MappedArena) -> None:
        _check_arena(self._order.arena, arena)
        pool.check_blocks([read.block_id for read in self._order.reads])
        for first in (self._order.reads[group[0]] for group in self._groups):
            _check_shape(first, pool)
        for read in self._order.reads:
            if read.num_bytes != pool.piece_bytes(read.shard):
                raise StoreError(f"a record of {read.num_bytes} bytes cannot hold {read.shard}")
            _check_record(read.offset, read.num_bytes, arena)


def _check_arena(arena: bytes, mapped: MappedArena) -> None:
    if arena != mapped.id:
        raise StoreError("the order is for another arena than the one that is mapped")


def _check_record(offset: int, num_bytes: int, arena: MappedArena) -> None:
    if offset < 0 or offset % HEADER_BYTES or offset + HEADER_BYTES + num_bytes > arena.num_bytes:
        raise StoreError(
            f"a record of {num_bytes} bytes at {offset} is not within the arena of {arena.num_bytes}"
        )


def _check_shape(read: StoreRead, pool: KvPool) -> None:
    for whole in (read.shard, pool.layout.shard):
        if intersect(whole, read.piece) != read.piece:
            raise StoreError(f"{read.piece} is not part of {whole}")
    if read.shard.layer_start < 0 or read.shard.head_start < 0:
        raise StoreError(f"{read.shard} is no part of a model")
