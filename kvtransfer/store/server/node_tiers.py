"""Joins the tiers of one node: every change of the catalog becomes events, writes to NVMe, and announcements.

It has no connection, memory or file of its own: `kvtransfer.store.server.node.StoreNode` gives it those of a
node, and the simulator virtual ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from kvtransfer.common.clock import Clock, give_way
from kvtransfer.common.faults import Faults
from kvtransfer.common.group_shares import GroupUsage
from kvtransfer.common.tasks import Spawn, wait_first
from kvtransfer.config import StoreSettings
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity, Shard
from kvtransfer.store.dram.arena_space import ArenaSpace
from kvtransfer.store.dram.catalog import Catalog
from kvtransfer.store.index.holder_reader import Holder
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.nvme.segmented_log import SegmentedLog
from kvtransfer.store.record import space_id
from kvtransfer.store.remote.serve import LeasedRecord
from kvtransfer.store.server.catalog_view import CatalogView
from kvtransfer.store.server.disk import Disk
from kvtransfer.store.server.loader import GONE, LoadedRecord, RecordLoader, RemoteHolder
from kvtransfer.store.server.other_nodes import HolderIndex, RecordExchange
from kvtransfer.store.server.write_behind import WriteBehind

_log = logging.getLogger("tandem.store")

# When other nodes' records arrive too slowly, they are fetched in the first second of each period only, to
# notice when that changes.
_SLOW_PERIOD_S, _SLOW_TRIAL_S = 30.0, 1.0
# Engine cores are sent the content at the latest so long after they ask for it.
_FILLED_WAIT_S = 20.0
# Changes that are processed in a turn of the event loop, in some milliseconds.
_SETTLED_AT_ONCE = 512
# Engine cores are sent the rates again when one has changed by more than this part.
_RATE_CHANGE = 0.1


class NodeTiers:
    """All tiers of one node. Implements `CatalogEvents` for the catalog and `LocalRecords` for the exchange.

    `run` processes changes together, at the end of the event loop's turn; where there are very many, some in
    each turn.
    """

    def __init__(
        self, settings: StoreSettings, nvme: SegmentedLog | None, clock: Clock, faults: Faults, spawn: Spawn
    ) -> None:
        """Without `nvme` there is no such tier."""
        self.settings = settings
        self._clock = clock
        self._spawn = spawn
        self.catalog = Catalog(
            None,
            clock,
            faults,
            self,
            settings.dram_shares,
            GroupUsage(settings.nvme_shares, settings.nvme_bytes),
        )
        self.disk = Disk(settings, self.catalog, clock, nvme, self._moved)
        self.loader = RecordLoader(self.catalog, self.disk, settings.io_threads, spawn, self._missed)
        self.writes = WriteBehind(
            self.catalog, self.disk, settings.write_queue, spawn, lambda: self._has_news.set()
        )
        # Other nodes; None: there are none.
        self.index: HolderIndex | None = None
        self.exchange: RecordExchange | None = None
        self._views: dict[tuple[bytes, tuple[Shard, ...]], CatalogView] = {}
        # The records that were added, removed or moved; for those that were removed, the reason.
        self._changed: dict[RecordId, str] = {}
        # Those of an earlier time that are left to be processed.
        self._settling: Iterator[tuple[RecordId, str]] = iter(())
        self._announced: dict[RecordId, RecordInfo] = {}
        self._judged: deque[tuple[RecordInfo, bool]] = deque()
        self._has_news = asyncio.Event()
        self._sent_gb_s: dict[str, float] = {}
        self._was_filled = asyncio.Event()

    # -------------------------------------------------------------------------------------------- life

    async def open_disk(self) -> None:
        """Open NVMe; return when the records there are known."""
        await self.disk.open()
        kept = [held.info for held in self.catalog.records() if held.offset is not None]
        self._judged = deque((info, True) for info in reversed(kept))
        self._has_news.set()
        self._note_filled()

    def use(self, arena: ArenaSpace, exchange: RecordExchange | None) -> None:
        """Use this arena as the host tier, and exchange records with other nodes."""
        self.catalog.attach(arena)
        if exchange is not None:
            self.exchange = exchange
            self.loader.attach(exchange)
        self._has_news.set()
        self._note_filled()

    @property
    def is_filled(self) -> bool:
        """Whether the catalog has the records that an owner before this one kept in the arena and on NVMe."""
        return self._was_filled.is_set()

    async def wait_filled(self) -> None:
        """Return when it has them, or after `_FILLED_WAIT_S`: the host may refuse the memory of an arena."""
        await wait_first(self._was_filled.wait(), self._clock.sleep(_FILLED_WAIT_S))

    def _note_filled(self) -> None:
        if self.catalog.arena is not None and self.disk.was_tried.is_set():
            self._was_filled.set()

    async def run(self) -> None:
        """Process changes until cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            self._turn()
            if self._has_news.is_set():
                await give_way()

    def _turn(self) -> None:
        if self._settle():
            self._has_news.set()
        self.compact_if_needed()

    def compact_if_needed(self) -> None:
        """Begin to compact NVMe when space is short."""
        if self.disk.needs_compaction:
            self._spawn(self.disk.compact(), "store-compact")

    def gb_s(self) -> dict[str, float]:
        """Return the measured rates at which records are read into the host tier, by tier."""
        return {"nvme": self.disk.gb_s, "remote": 0.0 if self.exchange is None else self.exchange.rate.gb_s}

    def changed_gb_s(self) -> dict[str, float] | None:
        """Return these rates when one has changed since the last time, which engine cores are then sent."""
        rates, sent = self.gb_s(), self._sent_gb_s
        if all(abs(rate - sent.get(tier, 0.0)) <= _RATE_CHANGE * rate for tier, rate in rates.items()):
            return None
        self._sent_gb_s = rates
        return rates

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
        """Drop a view that no session uses any more."""
        if not view.is_open:
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

    def gone(self, record_id: RecordId, reason: str) -> None:
        self._changed[record_id] = reason
        self._has_news.set()

    def _judge(self, info: RecordInfo, *, is_put: bool) -> None:
        if self.disk.is_open:
            self._judged.append((info, is_put))
            self._has_news.set()

    def _moved(self, info: RecordInfo) -> None:
        self._changed.setdefault(info.id, "")
        self._has_news.set()

    def _settle(self) -> bool:
        """Process `_SETTLED_AT_ONCE` changes of records, and judge as many; return whether some are left."""
        changed = list(islice(self._settling, _SETTLED_AT_ONCE))
        if len(changed) < _SETTLED_AT_ONCE and self._changed:
            self._settling, self._changed = iter(self._changed.items()), {}
            changed += islice(self._settling, _SETTLED_AT_ONCE - len(changed))
        for view in self._views.values():
            for record, reason in changed:
                if record.space == view.space:
                    view.changed(record, reason)
            view.publish()
        if self.index is not None:
            for record, _ in changed:
                self._announce(self.index, record)
        for _ in range(min(len(self._judged), _SETTLED_AT_ONCE)):
            info, is_put = self._judged.popleft()
            if self.disk.is_worth(info, is_put=is_put):
                self.writes.offer(info)
        return len(changed) == _SETTLED_AT_ONCE or bool(self._changed or self._judged)

    def settle_all(self) -> None:
        """Process all changes."""
        while self._settle():
            pass

    def _announce(self, index: HolderIndex, record: RecordId) -> None:
        held = self.catalog.find(record)
        if held is not None:
            self._announced[record] = held.info
            index.announce(held.info, held.tiers[0])
        elif (info := self._announced.pop(record, None)) is not None:
            index.announce(info, None)

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
