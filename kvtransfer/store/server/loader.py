"""Loads records into the host tier from NVMe and from other nodes: each once, however many callers want it.

    want -> queue -> space in the arena -> read (NVMe: a thread, remote: the exchange) -> commit -> leases

Each caller gets a future of the record's leased offset in the arena, or of the reason why it is not
available.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtransfer.common.tasks import Spawn
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.store.dram.catalog import Catalog
from kvtransfer.store.messages.engine_session import HELD, REFUSED
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.remote.owner_link import Wanted
from kvtransfer.store.server.disk import Disk
from kvtransfer.store.server.other_nodes import RecordExchange

# The record is no longer where it was known to be, or could not be read.
GONE = -1
# The host tier has no space for the record.
NO_SPACE = -2

_REMOTE_BATCH = 16
# Batches under way from one node: the request of the second travels while the first is received.
_REMOTE_PARALLEL = 2


class LoadedRecord(NamedTuple):
    """A record in the host tier, leased for the caller; or `offset` is `GONE` or `NO_SPACE`."""

    offset: int
    info: RecordInfo


class RemoteHolder(NamedTuple):
    """A node that holds a record, according to the index."""

    holder: ReplicaIdentity
    address: str


@dataclass(eq=False)
class _Load:
    """A record that is being loaded. `remote` None: from NVMe."""

    info: RecordInfo
    remote: RemoteHolder | None
    waiters: list[asyncio.Future[LoadedRecord]] = field(default_factory=list)
    is_running: bool = False

    @property
    def is_wanted(self) -> bool:
        return any(not waiter.done() for waiter in self.waiters)


class RecordLoader:
    """All loads of one node. `on_missed(record)` is called when another node did not send the record."""

    def __init__(
        self,
        catalog: Catalog,
        disk: Disk,
        max_reads: int,
        spawn: Spawn,
        on_missed: Callable[[RecordId], None],
    ) -> None:
        self._exchange: RecordExchange | None = None
        self._on_missed = on_missed
        self._catalog = catalog
        self._disk = disk
        self._max_reads = max_reads
        self._spawn = spawn
        self._loads: dict[RecordId, _Load] = {}
        self._urgent: deque[_Load] = deque()
        self._lazy: deque[_Load] = deque()
        self._num_reading = 0
        self._remote: dict[RemoteHolder, deque[_Load]] = {}
        self._num_fetching: dict[RemoteHolder, int] = {}

    @property
    def num_waiting(self) -> int:
        """Records that are wanted and not yet loaded."""
        return len(self._loads)

    def attach(self, exchange: RecordExchange) -> None:
        """Load records of other nodes with this exchange; there was none before."""
        self._exchange = exchange

    def want(
        self, info: RecordInfo, remote: RemoteHolder | None, *, is_urgent: bool
    ) -> asyncio.Future[LoadedRecord]:
        """Load a record. `info` is that of the record on NVMe, or its known id and size (`remote`). A
        cancelled future leases nothing. Pass a future that is not awaited to its end to `forget`."""
        waiter: asyncio.Future[LoadedRecord] = asyncio.get_running_loop().create_future()
        load = self._loads.get(info.id)
        if load is None:
            load = self._loads[info.id] = _Load(info, remote)
            if remote is not None:
                self._remote.setdefault(remote, deque()).append(load)
            elif not is_urgent:
                self._lazy.append(load)
        load.waiters.append(waiter)
        if is_urgent and load.remote is None and not load.is_running:
            self._urgent.append(load)  # it may be queued twice, and is begun once
        self._pump()
        return waiter

    def forget(self, waiter: asyncio.Future[LoadedRecord]) -> None:
        """Cancel a wait, or end its lease."""
        if not waiter.done():
            waiter.cancel()
        elif not waiter.cancelled() and waiter.result().offset >= 0:
            self._catalog.release(waiter.result().offset)

    # -------------------------------------------------------------------------------------------- inside

    def _pump(self) -> None:
        """Begin the loads that may begin."""
        while self._num_reading < self._max_reads and (self._urgent or self._lazy):
            load = (self._urgent or self._lazy).popleft()
            offset = self._begin(load)
            if offset is not None:
                self._num_reading += 1
                self._spawn(self._read(load, offset), "store-read")
        for remote, waiting in list(self._remote.items()):
            if self._num_fetching.get(remote, 0) < _REMOTE_PARALLEL:
                self._fetch_batch(remote, waiting)

    def _begin(self, load: _Load) -> int | None:
        """Allocate the record's slot and return its offset; None when the load has ended, or began before."""
        if load.is_running or self._loads.get(load.info.id) is not load:
            return None
        if not load.is_wanted:
            del self._loads[load.info.id]
            return None
        offset = self._catalog.begin_read(load.info)
        if offset in (HELD, REFUSED):
            self._finish(load, GONE if offset == HELD else NO_SPACE)
            return None
        load.is_running = True
        return offset

    async def _read(self, load: _Load, offset: int) -> None:
        try:
            info = await self._disk.read(load.info.id, offset)
        finally:
            self._num_reading -= 1
        if info is None:
            self._catalog.abandon_read(offset)
        else:
            self._catalog.commit_read(offset, info.checksum, info)
        self._finish(load, GONE)
        self._pump()

    def _fetch_batch(self, remote: RemoteHolder, waiting: deque[_Load]) -> None:
        batch: dict[int, _Load] = {}
        while waiting and len(batch) < _REMOTE_BATCH:
            load = waiting.popleft()
            offset = self._begin(load)
            if offset is not None:
                batch[offset] = load
        if not waiting:
            del self._remote[remote]
        if batch:
            self._num_fetching[remote] = self._num_fetching.get(remote, 0) + 1
            self._spawn(self._fetch(remote, batch), "store-fetch-remote")

    async def _fetch(self, remote: RemoteHolder, batch: dict[int, _Load]) -> None:
        """Fetch a batch. The exchange frees the slots of records that did not arrive
        (`StoreNode.slot_free`)."""
        assert self._exchange is not None
        wanted = [Wanted(load.info.id, offset, load.info.num_bytes) for offset, load in batch.items()]
        try:
            sums = await self._exchange.fetch(remote.holder, remote.address, wanted)
        finally:
            self._num_fetching[remote] -= 1
            if not self._num_fetching[remote]:
                del self._num_fetching[remote]
        for offset, load in batch.items():
            checksum = sums.get(load.info.id)
            if checksum is None:
                self._on_missed(load.info.id)
            else:
                self._land(offset, load, checksum)
            self._finish(load, GONE)
        self._pump()

    def _land(self, offset: int, load: _Load, checksum: int) -> None:
        """Commit the record that another node wrote here, header page included, if it is the requested
        one."""
        arena = self._catalog.arena
        assert arena is not None
        info = arena.info_at(offset) or load.info
        wanted = load.info
        same = (info.id, info.sharing_group, info.num_bytes) == (
            wanted.id,
            wanted.sharing_group,
            wanted.num_bytes,
        )
        if same and info.checksum == checksum:
            self._catalog.commit_read(offset, checksum, info)
        else:
            self._catalog.abandon_read(offset)
            self._on_missed(load.info.id)

    def _finish(self, load: _Load, failure: int) -> None:
        """Give each caller that still waits a lease, if the record is in the host tier now."""
        del self._loads[load.info.id]
        for waiter in load.waiters:
            if waiter.done():
                continue
            held, offset = self._catalog.find(load.info.id), self._catalog.lease(load.info.id)
            if held is None or offset is None:
                waiter.set_result(LoadedRecord(failure, load.info))
            else:
                waiter.set_result(LoadedRecord(offset, held.info))
