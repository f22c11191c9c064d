"""The NVMe tier on the owner's event loop: blocking calls run on threads, and errors become misses.

The catalog changes on the loop only, before and after each call. `WriteBehind` queues what is worth a write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtransfer.blocks.checksum import checksum
from kvtransfer.common.clock import Clock, give_way
from kvtransfer.config import StoreSettings
from kvtransfer.errors import StoreError
from kvtransfer.store.dram.catalog import Catalog
from kvtransfer.store.messages.admin_requests import TierStat
from kvtransfer.store.messages.records import PurgeOrder, RecordId, RecordInfo
from kvtransfer.store.nvme.page_io import PageBuffer
from kvtransfer.store.nvme.segment import NvmeRef
from kvtransfer.store.nvme.segment_table import Compacted
from kvtransfer.store.nvme.segmented_log import SegmentedLog
from kvtransfer.store.policy.nvme_admission import Admission
from kvtransfer.store.record import HEADER_BYTES, image_bytes

_RETRY_OPEN_S = 10.0
# Records of the folder that are entered in the catalog in a turn of the event loop.
_ADDED_AT_ONCE = 512

_log = logging.getLogger("tandem.store")

R = TypeVar("R")


class Disk:
    """The NVMe tier of one node. `on_changed(record)` is called for every record that was added or removed.
    Without `nvme` there is no such tier: it holds nothing, and nothing is written."""

    def __init__(
        self,
        settings: StoreSettings,
        catalog: Catalog,
        clock: Clock,
        nvme: SegmentedLog | None,
        on_changed: Callable[[RecordInfo], None],
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._on_changed = on_changed
        self._capacity_bytes = settings.nvme_bytes
        self._segment_bytes = settings.segment_bytes
        self._admission = Admission(settings.admission, settings.nvme_bytes)
        # Writes at once, on threads of their own.
        self.max_writes = max(1, settings.io_threads // 2)
        self._threads = ThreadPoolExecutor(settings.io_threads + self.max_writes, "store-io")
        self._upkeep = ThreadPoolExecutor(1, "store-upkeep")
        self._nvme = nvme
        # Whether its records are known; never without such a tier.
        self.is_open = False
        self._has_opened = False
        self._note = ""
        self._is_compacting = False
        # Set when it is known whether the folder can be used.
        self.was_tried = asyncio.Event()
        # Records that were used since they were written to NVMe.
        self._hit: set[RecordId] = set()

    # -------------------------------------------------------------------------------------------- life

    async def open(self) -> None:
        """Find the records of the folder; try again for as long as it cannot be used."""
        while self._nvme is not None and not self.is_open:
            try:
                found = await self._call(self._upkeep, self._nvme.open)
            except StoreError as error:
                if self._note != str(error):
                    _log.error("the NVMe tier cannot be used: %s", error)
                self._note = str(error)
                self.was_tried.set()
                await self._clock.sleep(_RETRY_OPEN_S)
                continue
            self._has_opened = True
            for number, (info, ref) in enumerate(found, 1):
                self._added(info, ref)
                if number % _ADDED_AT_ONCE == 0:
                    await give_way()
            self.is_open, self._note = True, ""
        self.was_tried.set()

    async def close(self) -> None:
        """Make everything durable and close the tier. No read or write may be under way."""
        self.is_open = False
        await asyncio.to_thread(self._threads.shutdown)
        if self._nvme is not None and self._has_opened:
            await self._call(self._upkeep, self._nvme.close)
        self._upkeep.shutdown()

    # ------------------------------------------------------------------------------------------- policy

    @property
    def may_write(self) -> bool:
        """Whether writes are allowed: not without such a tier, and not for a while after an error."""
        return self._nvme is not None and self.is_open and self._nvme.can_write

    def is_worth(self, info: RecordInfo, *, is_put: bool) -> bool:
        """Whether a record of the host tier shall be written, because it was put there (`is_put`) or hit."""
        if self._nvme is None or not self.is_open:
            return False
        held = self._catalog.find(info.id)
        if held is not None and held.nvme is not None:
            if not is_put:
                self._hit.add(info.id)
                self._admission.hit(info, self._is_full)
            return False
        return (self._admission.put if is_put else self._admission.hit)(info, self._is_full)

    @property
    def _is_full(self) -> bool:
        assert self._nvme is not None
        return self._nvme.stat().num_bytes + 2 * self._segment_bytes > self._capacity_bytes

    # -------------------------------------------------------------------------------------- read, write

    async def read(self, record: RecordId, offset: int) -> RecordInfo | None:
        """Read the record's payload into its slot of the arena at `offset`; None when that failed, after
        which the record is not on NVMe any more."""
        held, arena = self._catalog.find(record), self._catalog.arena
        if held is None or held.nvme is None or held.nvme_info is None or arena is None or self._nvme is None:
            return None
        ref, info = held.nvme, held.nvme_info
        try:
            await self._call(self._threads, self._nvme.read, ref, info, arena.image(offset, info.num_bytes))
        except StoreError as error:
            _log.warning("a record is lost: %s", error)
            self._lost(record, ref)
            return None
        self._hit.add(record)
        self._admission.nvme_hit(record)
        return info

    async def write(self, records: Sequence[tuple[RecordId, int]]) -> None:
        """Append these records of the arena, at offsets that the caller has leased."""
        arena = self._catalog.arena
        if self._nvme is None or not self.is_open or arena is None:
            return
        left: list[tuple[int, memoryview, RecordInfo]] = []
        for record, offset in records:
            held = self._catalog.find(record)
            if held is None or held.offset != offset or held.nvme is not None:  # purged, or written since
                continue
            if self._make_space(held.info):
                left.append((offset, arena.image(offset, held.info.num_bytes), held.info))
        while left:
            run = [(image, info) for _, image, info in left]
            try:
                refs = await self._call(self._threads, self._nvme.write_run, run)
            except StoreError as error:
                _log.debug("%d records were not written: %s", len(left), error)
                return
            stale: list[NvmeRef] = []
            for (offset, _, info), ref in zip(left, refs, strict=False):
                if self._catalog.is_findable(offset):
                    self._added(info, ref)
                    self._admission.written(info)
                else:  # purged, or found bad, while it was written
                    stale.append(ref)
            del left[: len(refs)]
            if stale:
                await self.erase(stale)

    @property
    def needs_compaction(self) -> bool:
        """Whether space must be freed for the next writes, and no compaction runs yet."""
        return (
            self._nvme is not None
            and self.is_open
            and not self._is_compacting
            and self._nvme.needs_compaction
        )

    async def compact(self) -> None:
        """Free space for the next writes."""
        assert self._nvme is not None
        self._is_compacting = True
        hit, exceeding = frozenset(self._hit), self._catalog.exceeding_nvme()

        def is_wanted(info: RecordInfo) -> bool:
            """Return whether to keep the record: while groups exceed their share, the records of the other
            groups stay although nobody has used them."""
            return info.sharing_group not in exceeding if exceeding else info.id in hit

        try:
            compacted = await self._call(self._upkeep, self._nvme.compact, is_wanted)
        except StoreError as error:
            _log.warning("the NVMe tier could not be compacted: %s", error)
        else:
            self._take_over(compacted, "share" if exceeding else "space")
        finally:
            self._is_compacting = False

    def drop(self, record: RecordId, ref: NvmeRef) -> None:
        """Drop a record that has left the catalog; a restart may find it again."""
        if self._nvme is not None:
            self._nvme.drop(ref)
        self._admission.forgotten(record)
        self._hit.discard(record)

    async def erase(self, refs: Iterable[NvmeRef], order: PurgeOrder | None = None) -> str:
        """Drop these and all that the order means, durably and to the last byte; return why that failed, or
        "". This owner does not find them again either way."""
        return await self._erase(lambda nvme: nvme.erase(list(refs), order))

    async def end_purge(self, order: PurgeOrder) -> str:
        """Complete the order, once no write that it met still runs; return why that failed, or ""."""
        return await self._erase(lambda nvme: nvme.end_purge(order))

    async def _erase(self, work: Callable[[SegmentedLog], None]) -> str:
        if self._nvme is None:
            return ""
        if not self.is_open:
            return f"the records on NVMe are not known: {self._note or 'they are being read'}"
        try:
            await self._call(self._upkeep, work, self._nvme)
        except StoreError as error:
            _log.error("what was purged may come back after a restart: %s", error)
            return str(error)
        return ""

    # --------------------------------------------------------------------------------------------- admin

    async def examine(self, record: RecordId) -> bool | None:
        """Verify the record's checksum, and drop a bad one. None: it is not on NVMe (any more)."""
        held = self._catalog.find(record)
        if held is None or held.nvme is None or held.nvme_info is None or self._nvme is None:
            return None
        ref, info = held.nvme, held.nvme_info
        image = PageBuffer(image_bytes(info.num_bytes)).view
        try:
            await self._call(self._upkeep, self._nvme.read, ref, info, image, True)
        except StoreError as error:
            _log.warning("a record is lost: %s", error)
        else:
            payload = image[HEADER_BYTES : HEADER_BYTES + info.num_bytes]
            if await self._call(self._upkeep, checksum, payload) == info.checksum:
                return True
        return False if self._lost(record, ref) else None

    @property
    def gb_s(self) -> float:
        """The measured rate of reads, in 1e9 bytes a second."""
        return 0.0 if self._nvme is None else self._nvme.stat().read_gb_s

    def stat(self) -> TierStat | None:
        """Return the tier's statistics; None: there is no such tier."""
        if self._nvme is None:
            return None
        if not self.is_open:
            return TierStat("nvme", 0, self._capacity_bytes, 0, note=self._note or "not yet read")
        return self._nvme.stat()

    # -------------------------------------------------------------------------------------------- inside

    def _make_space(self, info: RecordInfo) -> bool:
        """Whether the record may be written: while the tier is full, in place of others, by the shares of
        groups."""
        if self._nvme is None or not self._is_full:
            return True
        dropped = self._catalog.make_nvme_space(info)
        for other, ref in dropped or ():
            assert ref is not None
            self._nvme.drop(ref)
            self._admission.dropped(other.id)
            self._hit.discard(other.id)
            self._on_changed(other)
        return dropped is not None

    def _added(self, info: RecordInfo, ref: NvmeRef) -> None:
        before = self._catalog.added_nvme(info, ref)
        if before is not None and self._nvme is not None:
            self._nvme.drop(before)
        self._on_changed(info)

    def _take_over(self, compacted: Compacted, reason: str) -> None:
        """Note where a compaction moved records, and which it dropped, for this reason."""
        assert self._nvme is not None
        stale: list[NvmeRef] = []
        for info, old, new in compacted.moved:
            self._hit.discard(info.id)
            if not self._catalog.moved_nvme(info.id, old, new):
                stale.append(new)
        for ref in stale:
            self._nvme.drop(ref)
        for info, ref in compacted.dropped:
            if self._catalog.removed_nvme(info.id, ref, reason):
                self._admission.dropped(info.id)
                self._hit.discard(info.id)
                self._on_changed(info)

    def _lost(self, record: RecordId, ref: NvmeRef) -> bool:
        """Drop a record that cannot be read; False when it has been moved or dropped since."""
        held = self._catalog.find(record)
        if held is None or not self._catalog.removed_nvme(record, ref, "corrupt"):
            return False
        self.drop(record, ref)
        self._on_changed(held.info)
        return True

    async def _call(self, threads: ThreadPoolExecutor, work: Callable[..., R], *args: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(threads, work, *args)
