"""Write admitted records to NVMe in the background.

offer -> late: dropped if it leaves the host tier -> queue: leased, so that it stays -> written
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvtransfer.common.tasks import Spawn
from kvtransfer.store.dram.catalog import Catalog
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.record import image_bytes
from kvtransfer.store.server.disk import Disk

_BATCH_BYTES = 4 << 20
# Records that wait for a place in the queue.
_MAX_LATE = 1 << 16
# The largest part of the arena that is leased for the queue.
_MAX_LEASED_SHARE = 0.25


class _Queued(NamedTuple):
    info: RecordInfo
    offset: int
    num_bytes: int


class WriteBehind:
    """The write queue of one node. `on_done` is called after every write: a compaction may be due."""

    def __init__(
        self,
        catalog: Catalog,
        disk: Disk,
        max_queued: int,
        spawn: Spawn,
        on_done: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._disk = disk
        self._max_queued = max_queued
        self._spawn = spawn
        self._on_done = on_done
        self._queue: deque[_Queued] = deque()
        self._pending: set[RecordId] = set()
        self._late: dict[RecordId, RecordInfo] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._num_leased_bytes = 0
        self._became_idle = asyncio.Event()
        self._became_idle.set()
        self.num_dropped = 0

    @property
    def num_waiting(self) -> int:
        """Records that may still be written."""
        return len(self._pending) + len(self._late)

    def offer(self, info: RecordInfo) -> None:
        """Write this record of the host tier when there is time, unless it has left by then."""
        if info.id in self._pending or info.id in self._late:
            return
        self._late[info.id] = info
        if len(self._late) > _MAX_LATE:
            self._drop(next(iter(self._late)))
        self._fill()

    async def flush(self) -> None:
        """Return when nothing waits any more, or writes are suspended."""
        self._fill()
        while self._pending:
            await self._became_idle.wait()
            self._fill()

    async def passed(self) -> None:
        """Return when the writes that run now have ended."""
        if self._writing:
            await asyncio.wait(set(self._writing))

    def drop_all(self) -> None:
        """Drop the queued writes; writes that run continue."""
        self._late.clear()
        while self._queue:
            self._done(self._queue.popleft())

    def _fill(self) -> None:
        """Queue as many records as fit, the oldest first."""
        arena = self._catalog.arena
        while self._late and self._disk.may_write and arena is not None:
            record, info = next(iter(self._late.items()))
            num_bytes = image_bytes(info.num_bytes)
            if self._pending and (
                len(self._pending) >= self._max_queued
                or self._num_leased_bytes + num_bytes > _MAX_LEASED_SHARE * arena.capacity_bytes
            ):
                break
            offset = self._catalog.lease(record, is_hit=False)
            if offset is None:  # it has left the host tier
                self._drop(record)
                continue
            del self._late[record]
            self._pending.add(record)
            self._num_leased_bytes += num_bytes
            self._became_idle.clear()
            self._queue.append(_Queued(info, offset, num_bytes))
        if not self._disk.may_write:
            for record in list(self._late):
                self._drop(record)
        self._pump()

    def _drop(self, record: RecordId) -> None:
        del self._late[record]
        self.num_dropped += 1

    def _pump(self) -> None:
        while self._queue and len(self._writing) < self._disk.max_writes:
            task = self._spawn(self._write(self._batch()), "store-write")
            self._writing.add(task)
            task.add_done_callback(self._written)

    def _batch(self) -> list[_Queued]:
        """Take the next records, of about `_BATCH_BYTES`."""
        batch = [self._queue.popleft()]
        num_bytes = batch[0].num_bytes
        while self._queue and num_bytes + self._queue[0].num_bytes <= _BATCH_BYTES:
            num_bytes += self._queue[0].num_bytes
            batch.append(self._queue.popleft())
        return batch

    async def _write(self, batch: list[_Queued]) -> None:
        try:
            await self._disk.write([(queued.info.id, queued.offset) for queued in batch])
        finally:
            for queued in batch:
                self._done(queued)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writing.discard(task)
        self._on_done()
        self._fill()

    def _done(self, queued: _Queued) -> None:
        self._catalog.release(queued.offset)
        self._pending.discard(queued.info.id)
        self._num_leased_bytes -= queued.num_bytes
        if not self._pending:
            self._became_idle.set()
