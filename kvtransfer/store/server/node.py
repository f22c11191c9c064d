"""Joins the tiers of one node: every change of the catalog becomes events, writes to NVMe, and
announcements."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.group_shares import GroupUsage
from kvtransfer.common.tasks import Spawn
from kvtransfer.config import StoreSettings
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity, Shard
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.dram.arena import Arena, fill_with_zeros
from kvtransfer.store.dram.catalog import Catalog, Purged
from kvtransfer.store.dram.prefault import Prefault
from kvtransfer.store.index.holder_reader import Holder
from kvtransfer.store.index.index import Index
from kvtransfer.store.messages.records import PurgeOrder, RecordId, RecordInfo, Tier
from kvtransfer.store.record import space_id
from kvtransfer.store.remote.exchange import Exchange, arena_pool
from kvtransfer.store.remote.serve import LeasedRecord
from kvtransfer.store.server.catalog_view import CatalogView
from kvtransfer.store.server.disk import Disk
from kvtransfer.store.server.loader import GONE, LoadedRecord, RecordLoader, RemoteHolder
from kvtransfer.store.server.write_behind import WriteBehind

_log = logging.getLogger("tandem.store")

# When other nodes' records arrive too slowly, they are fetched in the first second of each period only, to
# notice when that changes.
_SLOW_PERIOD_S, _SLOW_TRIAL_S = 30.0, 1.0


class StoreNode:
    """All tiers of one node. Implements `CatalogEvents` for the catalog and `LocalRecords` for the exchange.

    `run` processes changes together, at the end of the event loop's turn.
    """

    def __init__(
        self, settings: StoreSettings, trust: Trust, clock: Clock, faults: Faults, spawn: Spawn
    ) -> None:
        self.settings = settings
        self._trust = trust
        self._clock = clock
        self._faults = faults
        self._spawn = spawn
        self.catalog = Catalog(
            None,
            clock,
            faults,
            self,
            settings.dram_shares,
            GroupUsage(settings.nvme_shares, settings.nvme_bytes),
        )
        self.disk = Disk(settings, self.catalog, clock, faults, self._moved)
        self.loader = RecordLoader(self.catalog, self.disk, settings.io_threads, spawn, self._missed)
        self.writes = WriteBehind(
            self.catalog, self.disk, settings.write_queue, spawn, lambda: self._has_news.set()
        )
        self.index: Index | None = None
        self.exchange: Exchange | None = None
        self._views: dict[tuple[bytes, tuple[Shard, ...]], CatalogView] = {}
        self._changed: set[RecordId] = set()
        self._announced: dict[RecordId, RecordInfo] = {}
        self._judged: list[tuple[RecordInfo, bool]] = []
        self._has_news = asyncio.Event()
        self._prefault: Prefault | None = None

    # -------------------------------------------------------------------------------------------- life

    async def open(self, address: str) -> None:
        """Open the index, under this owner's `address`, and NVMe; return when the records on NVMe are
        known."""
        if self.settings.redis_url:
            identity = ReplicaIdentity(self.settings.node_id, self.settings.epoch)
            self.index = Index(self.settings, identity, address, self._clock, self._everything)
            await self.index.start()
        await self.disk.open()
        kept = [held.info for held in self.catalog.records() if held.offset is not None]
        self._judged = [(info, True) for info in reversed(kept)]
        self._has_news.set()

    def attach(self, arena: Arena, prefault: Prefault) -> None:
        """Use this arena as the host tier, and begin to exchange records with other nodes."""
        self.catalog.attach(arena)
        self._prefault = prefault
        pool = arena_pool(arena.fd, arena.num_bytes, arena.granule_bytes)
        self.exchange = Exchange(
            self.settings, self._trust, pool, self, self._spawn, self._clock, self._faults
        )
        self.loader.attach(self.exchange)
        self._has_news.set()

    async def run(self) -> None:
        """Process changes until cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            self._settle()
            self.compact_if_needed()
            if self._prefault is not None:
                self._prefault.top_up()

    def compact_if_needed(self) -> None:
        """Begin to compact NVMe when space is short."""
        if self.disk.needs_compaction:
            self._spawn(self.disk.compact(), "store-compact")

    def gb_s(self) -> dict[str, float]:
        """Return the measured rates at which records are read into the host tier, by tier."""
        return {"nvme": self.disk.gb_s, "remote": 0.0 if self.exchange is None else self.exchange.rate.gb_s}

    async def close(self, flush_s: float) -> None:
        """Write admitted records to NVMe for at most `flush_s`, and leave the index."""
        self._settle()
        try:
            async with asyncio.timeout(flush_s):
                await self.disk.was_tried.wait()  # records from before are judged only then
                self._settle()
                await self.writes.flush()
        except TimeoutError:
            _log.warning("%d records were not written to NVMe in time", self.writes.num_waiting)
            self.writes.drop_all()
            await self.writes.flush()
        if self.index is not None:
            await self.index.close()

    async def release(self) -> None:
        """Close the tiers, when no task of the node runs any more."""
        await self.disk.close()
        if self.exchange is not None:
            await self.exchange.close()
        if self.catalog.arena is not None:
            self.catalog.arena.close()

    # -------------------------------------------------------------------------------------------- views

    def view(self, compatibility: CompatibilityRecord, shards: Sequence[Shard]) -> CatalogView:
        """Return the view of replicas of this shape, which they share."""
        key = space_id(compatibility), tuple(shards)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = CatalogView(
                compatibility, shards, self.catalog, lambda: self.index, self.usable
            )
        return view

    def forget(self, view: CatalogView) -> None:
        """Drop a view that no session watches any more."""
        if not view.is_watched:
            del self._views[view.space, view.shards]

    # -------------------------------------------------------------------------------------------- blocks

    def load(
        self, record: RecordInfo, holders: Sequence[Holder], *, is_urgent: bool
    ) -> asyncio.Future[LoadedRecord]:
        """Load a record into the host tier: from NVMe, or else from one of these nodes, for which `record`
        gives its id and size. The future is that of `RecordLoader.want`."""
        held = self.catalog.find(record.id)
        if held is not None and held.nvme_info is not None:
            return self.loader.want(held.nvme_info, None, is_urgent=is_urgent)
        remote = self._choose(holders)
        if remote is not None:
            return self.loader.want(record, remote, is_urgent=is_urgent)
        gone: asyncio.Future[LoadedRecord] = asyncio.get_running_loop().create_future()
        gone.set_result(LoadedRecord(GONE, record))
        return gone

    def usable(self, holders: Sequence[Holder]) -> tuple[Holder, ...]:
        """Return the holders that could be contacted now."""
        return tuple(each for each in holders if self._choose((each,)) is not None)

    def pin(self, record: RecordId) -> None:
        """Keep it in the host tier for a while."""
        self.catalog.pin(record, self._clock.now() + self.settings.prefetch_pin_s)

    def bad(self, offset: int) -> None:
        """Drop the record that a reader has leased at `offset` from all tiers: its checksum is wrong."""
        dropped = self.catalog.bad(offset)
        if dropped is not None:
            _log.warning(
                "dropped a record of sharing group %r with a wrong checksum", dropped.info.sharing_group
            )
            if dropped.nvme is not None:
                self.disk.drop(dropped.info.id, dropped.nvme)

    async def purge(self, order: PurgeOrder) -> tuple[str, Purged]:
        """Delete these records from all tiers, and clear their memory and their places on NVMe. Also return
        why a restart may bring some back from NVMe, or ""."""
        purged = self.catalog.purge(order, keeps_slots=True)
        # A client that no longer waits for the answer must not keep slots from being free.
        clearing = self._spawn(self._clear(purged.slots), "store-clear")
        failure = await self.disk.erase(purged.erase, order)
        await self.writes.passed()
        failure = failure or await self.disk.end_purge(order)
        await asyncio.wait([clearing])
        return failure, purged

    async def _clear(self, offsets: Sequence[int]) -> None:
        """Clear these slots on a thread, and free them."""
        for offset in offsets:
            if (memory := self.catalog.unread_memory(offset)) is not None:
                await asyncio.to_thread(fill_with_zeros, memory)
                self.catalog.cleared(offset)
            self.catalog.release(offset)

    def _choose(self, holders: Sequence[Holder]) -> RemoteHolder | None:
        exchange = self.exchange
        if exchange is None:
            return None
        is_slow = 0 < exchange.rate.gb_s < self.settings.remote_min_gb_s
        if is_slow and self._clock.now() % _SLOW_PERIOD_S > _SLOW_TRIAL_S:
            return None
        for each in sorted(holders, key=lambda holder: holder.tier != "dram"):
            identity = ReplicaIdentity(each.node_id, each.epoch)
            if not exchange.is_cooling(identity):
                return RemoteHolder(identity, each.address)
        return None

    def _missed(self, record: RecordId) -> None:
        for view in self._views.values():
            if view.space == record.space:
                view.forget(record.key)

    # --------------------------------------------------------------- events of the catalog (CatalogEvents)

    def committed(self, info: RecordInfo) -> None:
        self._judge(info, is_put=True)
        self._moved(info)

    def touched(self, info: RecordInfo) -> None:
        self._judge(info, is_put=False)

    def evicted(self, info: RecordInfo) -> None:
        self._moved(info)

    def gone(self, record_id: RecordId) -> None:
        self._changed.add(record_id)
        self._has_news.set()

    def _judge(self, info: RecordInfo, *, is_put: bool) -> None:
        if self.disk.is_open:
            self._judged.append((info, is_put))
            self._has_news.set()

    def _moved(self, info: RecordInfo) -> None:
        self._changed.add(info.id)
        self._has_news.set()

    def _settle(self) -> None:
        """Process all changes since the last call."""
        changed, self._changed = self._changed, set()
        for view in self._views.values():
            for record in changed:
                if record.space == view.space:
                    view.changed(record)
            view.publish()
        if self.index is not None:
            for record in changed:
                self._announce(self.index, record)
        judged, self._judged = self._judged, []
        for info, is_put in judged:
            if self.disk.is_worth(info, is_put=is_put):
                self.writes.offer(info)

    def _announce(self, index: Index, record: RecordId) -> None:
        held = self.catalog.find(record)
        if held is not None:
            self._announced[record] = held.info
            index.announce(held.info, held.tiers[0])
        elif (info := self._announced.pop(record, None)) is not None:
            index.announce(info, None)

    def _everything(self) -> Iterator[tuple[RecordInfo, Tier]]:
        return ((held.info, held.tiers[0]) for held in self.catalog.records())

    # -------------------------------------------------------------- records for other nodes (LocalRecords)

    async def lease_record(self, record: RecordId) -> LeasedRecord | None:
        held = self.catalog.find(record)
        if held is None:
            return None
        offset, info = self.catalog.lease(record), held.info
        if offset is None:
            load = self.loader.want(info, None, is_urgent=False)
            try:
                offset, info = await load
            except asyncio.CancelledError:
                self.loader.forget(load)
                raise
            if offset < 0:
                return None
        return LeasedRecord(offset, info.num_bytes, info.checksum)

    def release_record(self, leased: LeasedRecord) -> None:
        self.catalog.release(leased.offset)

    def slot_free(self, offset: int) -> None:
        self.catalog.abandon_read(offset)
