"""Copy between the blocks of the pool and the records of the arena, batch by batch.

Everything that an order names is checked before its first byte: an owner or an engine core may be wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

from kvtransfer.blocks.layout import Run, intersect
from kvtransfer.blocks.pool import RecordPool
from kvtransfer.blocks.runs import RunTable, sum_runs
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

    def start(self, pools: Sequence[RecordPool], arena: MappedArena, now: float) -> None:
        """Begin or continue the order. `StoreError` or `IndexError` when it does not fit the pools, one of
        each group of layers, or the arena."""
        if self._started_at is None:
            self._check(pools, arena)
            self._started_at = now

    @abstractmethod
    def next(self, limit_bytes: int) -> CopyBatch | None:
        """Return the next copies, of at most `limit_bytes` bytes if more than one; None: all are done."""

    @abstractmethod
    def copy(self, batch: CopyBatch, pools: Sequence[RecordPool], arena: MappedArena, faults: Faults) -> None:
        """Copy a batch."""

    @abstractmethod
    def done(self, now: float) -> StorePutDone | StoreGetDone:
        """Return the answer when all is copied."""

    @abstractmethod
    def failed(self, reason: str) -> StorePutDone | StoreGetDone:
        """Return the answer when the order is given up."""

    @abstractmethod
    def _check(self, pools: Sequence[RecordPool], arena: MappedArena) -> None:
        """See `start`."""

    def _seconds(self, now: float) -> float:
        return 0.0 if self._started_at is None else now - self._started_at


class PutWork(CopyWork):
    """Copies whole blocks into records."""

    traffic: ClassVar[TrafficClass] = "write_back"

    def __init__(self, order: StorePut) -> None:
        super().__init__()
        self._order = order
        # The payload of records of KV, and of states.
        self._sizes = [0, 0]
        self._sums: list[int] = []

    def next(self, limit_bytes: int) -> CopyBatch | None:
        start, copies = len(self._sums), self._order.copies
        if start == len(copies):
            return None
        is_state, size = copies[start].is_state, self._sizes[copies[start].is_state]
        end = start + 1
        while (
            end < len(copies) and copies[end].is_state == is_state and (end + 1 - start) * size <= limit_bytes
        ):
            end += 1
        return CopyBatch(range(start, end), (end - start) * size)

    def copy(self, batch: CopyBatch, pools: Sequence[RecordPool], arena: MappedArena, faults: Faults) -> None:
        faults.at("store.copy.put")
        copies = [self._order.copies[position] for position in batch.positions]
        offsets = [copy.offset + HEADER_BYTES for copy in copies]
        parts = RecordParts.of(pools, is_state=copies[0].is_state)
        sums: list[int] = []
        for number, pool in parts.held():
            block_ids = [(copy.block_id, *copy.windows)[number] for copy in copies]
            sums = pool.store(block_ids, arena.region, offsets, parts.layers)
        self._sums += sums or _record_sums(arena, offsets, self._sizes[copies[0].is_state])
        self._num_bytes += batch.num_bytes
        if faults.at("store.corrupt.put"):
            arena.region.bytes[offsets[0]] ^= 1

    def done(self, now: float) -> StorePutDone:
        return StorePutDone(self._order.number, tuple(self._sums), self._num_bytes, self._seconds(now))

    def failed(self, reason: str) -> StorePutDone:
        return StorePutDone(self._order.number, (), 0, 0.0, reason)

    def _check(self, pools: Sequence[RecordPool], arena: MappedArena) -> None:
        _check_arena(self._order.arena, arena)
        for is_state in {copy.is_state for copy in self._order.copies}:
            parts = RecordParts.of(pools, is_state=is_state)
            size = self._sizes[is_state] = parts.record_bytes(pools[0].layout.shard)
            copies = [copy for copy in self._order.copies if copy.is_state == is_state]
            for copy in copies:
                parts.check_windows(copy.windows)
                _check_record(copy.offset, size, arena)
            for number, pool in parts.held():
                pool.check_blocks([(it.block_id, *it.windows)[number] for it in copies])


class GetWork(CopyWork):
    """Copies pieces of blocks from records, in batches of records of the same shape."""

    traffic: ClassVar[TrafficClass] = "prefetch"

    def __init__(self, order: StoreGet) -> None:
        super().__init__()
        self._order = order
        shapes: dict[tuple[Shard, Shard, bool], list[int]] = {}
        for position, read in enumerate(order.reads):
            shapes.setdefault((read.shard, read.piece, read.is_state), []).append(position)
        self._groups = list(shapes.values())
        # The copies of the first group that are done already.
        self._num_done = 0
        self._bad: list[int] = []

    def next(self, limit_bytes: int) -> CopyBatch | None:
        if not self._groups:
            return None
        group = self._groups[0]
        num_bytes = self._order.reads[group[0]].num_bytes
        positions = group[self._num_done : self._num_done + max(1, limit_bytes // max(1, num_bytes))]
        return CopyBatch(positions, len(positions) * num_bytes)

    def copy(self, batch: CopyBatch, pools: Sequence[RecordPool], arena: MappedArena, faults: Faults) -> None:
        faults.at("store.copy.get")
        reads = [self._order.reads[position] for position in batch.positions]
        for read in reads:
            arena.expect(read.offset, HEADER_BYTES + read.num_bytes)
        shard, piece = reads[0].shard, reads[0].piece
        offsets = [read.offset + HEADER_BYTES for read in reads]
        parts = RecordParts.of(pools, is_state=reads[0].is_state)
        sums: list[int] = []
        for number, pool in parts.held():
            if not pool.piece_bytes(piece):
                continue  # the record has no layers of this group, or none for this rank
            named = [(read.block_id, *read.windows)[number] for read in reads]
            wanted = [
                (block_id, offset) for block_id, offset in zip(named, offsets, strict=True) if block_id >= 0
            ]
            block_ids, places = [it for it, _ in wanted], [it for _, it in wanted]
            sums = pool.load(block_ids, piece, arena.region, places, shard, parts.layers)
        sums = sums or _record_sums(arena, offsets, reads[0].num_bytes)
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

    def _check(self, pools: Sequence[RecordPool], arena: MappedArena) -> None:
        _check_arena(self._order.arena, arena)
        for first in (self._order.reads[group[0]] for group in self._groups):
            _check_shape(first, pools[0])
        for is_state in {read.is_state for read in self._order.reads}:
            parts = RecordParts.of(pools, is_state=is_state)
            reads = [read for read in self._order.reads if read.is_state == is_state]
            for read in reads:
                parts.check_windows(read.windows)
                if read.num_bytes != parts.record_bytes(read.shard):
                    raise StoreError(f"a record of {read.num_bytes} bytes cannot hold {read.shard}")
                _check_record(read.offset, read.num_bytes, arena)
            for number, pool in parts.held():
                named = [(read.block_id, *read.windows)[number] for read in reads]
                pool.check_blocks([block_id for block_id in named if block_id != -1 or not number])


class RecordParts(NamedTuple):
    """The pools of a rank whose blocks make up one kind of record, and the layers that such records have
    (None: all of the model). Where some groups of layers have states, records of KV have the others."""

    pools: Sequence[RecordPool]
    layers: tuple[int, ...] | None

    @staticmethod
    def of(pools: Sequence[RecordPool], *, is_state: bool) -> RecordParts:
        """Return the parts of a record of states, or of KV. `StoreError` when there are no states."""
        its = [pool for pool in pools if pool.layout.is_state == is_state]
        if not its:
            raise StoreError(f"this rank has no blocks of {'states' if is_state else 'KV'}")
        if len(its) == len(pools):
            return RecordParts(its, None if len(its) > 1 else its[0].layout.group)
        return RecordParts(its, tuple(sorted(layer for pool in its for layer in pool.layout.group or ())))

    def held(self) -> Iterator[tuple[int, RecordPool]]:
        """Yield the pools of groups of which this rank has layers, with the numbers of the groups."""
        for number, pool in enumerate(self.pools):
            if pool.layout.block_bytes:
                yield number, pool

    def record_bytes(self, shard: Shard) -> int:
        """Return the payload of a record of this shard."""
        return replace(self.pools[0].layout, shard=shard, group=self.layers).block_bytes

    def check_windows(self, windows: Sequence[int]) -> None:
        """Raise `StoreError` unless there is a block for each group behind the first."""
        if len(windows) != len(self.pools) - 1:
            num_groups = len(self.pools) - 1
            raise StoreError(f"{len(windows)} blocks of windows, this rank has {num_groups} groups of them")


def _record_sums(arena: MappedArena, offsets: Sequence[int], num_bytes: int) -> list[int]:
    """Sum the payloads of records, to which several groups of layers have contributed."""
    return sum_runs(arena.region, offsets, RunTable([Run(0, 0, num_bytes)]))


def _check_arena(arena: bytes, mapped: MappedArena) -> None:
    if arena != mapped.id:
        raise StoreError("the order is for another arena than the one that is mapped")


def _check_record(offset: int, num_bytes: int, arena: MappedArena) -> None:
    if offset < 0 or offset % HEADER_BYTES or offset + HEADER_BYTES + num_bytes > arena.num_bytes:
        raise StoreError(
            f"a record of {num_bytes} bytes at {offset} is not within the arena of {arena.num_bytes}"
        )


def _check_shape(read: StoreRead, pool: RecordPool) -> None:
    for whole in (read.shard, pool.layout.shard):
        if intersect(whole, read.piece) != read.piece:
            raise StoreError(f"{read.piece} is not part of {whole}")
    if read.shard.layer_start < 0 or read.shard.head_start < 0:
        raise StoreError(f"{read.shard} is no part of a model")
