"""Copy between the blocks of the pool and the records of the arena, batch by batch.

Everything that an order names is checked before its first byte: an owner or an engine core may be wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from kvtransfer.blocks.layout import intersect
from kvtransfer.blocks.pool import KvPool
from kvtransfer.common.faults import Faults
from kvtransfer.errors import StoreError
from kvtransfer.messages import Shard
from kvtransfer.store.messages.records import HEADER_BYTES
from kvtransfer.store.messages.store_orders import StoreGet, StoreGetDone, StorePut, StorePutDone, StoreRead
from kvtransfer.store.owner_connection import MappedArena
from kvtransfer.transfer_orders import TrafficClass


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
        """Return the next copies, of at most `limit_bytes` bytes if more than one; None: all are done."""

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
        # The copies of the first group that are done already.
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
