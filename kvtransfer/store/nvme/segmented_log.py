"""The log of records on NVMe: what is written where, and which segment is given up for space.

It has no file: `SegmentMedia` reads and writes. `kvtransfer.store.nvme.log.NvmeTier` is the log in a folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.errors import StoreError, StoreIoError
from kvtransfer.store.messages.admin_requests import TierStat
from kvtransfer.store.messages.records import PurgeOrder, RecordInfo
from kvtransfer.store.nvme.counters import NvmeCounters
from kvtransfer.store.nvme.page_io import PageBuffer, io_error
from kvtransfer.store.nvme.segment import NvmeRef, Segment
from kvtransfer.store.nvme.segment_media import SegmentMedia
from kvtransfer.store.nvme.segment_table import SURVIVING_SHARE, Compacted, Moved, SegmentTable
from kvtransfer.store.nvme.segment_writer import SegmentWriter
from kvtransfer.store.record import HEADER_BYTES, PAGE_BYTES, decode_header, image_bytes


class _Scratch(threading.local):
    """A buffer of each thread for one header page."""

    def __init__(self) -> None:
        self.page = PageBuffer(PAGE_BYTES).view


class SegmentedLog:
    """Segments of `segment_bytes`, of `capacity_bytes` together. All methods are thread-safe; all may block,
    except `drop` and the queries.

    `write` and `read` go straight between the arena and the media. Every error of these is a `StoreIoError`
    that names file and cause; after a failed write, writes are suspended for a while (`can_write`), reads
    continue. Refs are valid until `drop`, `erase`, or a `compact` that reports otherwise, perhaps before the
    caller has recorded the result of `write`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        segment_bytes: int,
        media: SegmentMedia,
        clock: Clock,
        faults: Faults,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._segment_bytes = segment_bytes // PAGE_BYTES * PAGE_BYTES
        self._faults = faults
        self._counters = NvmeCounters(clock)
        self._table = SegmentTable(self._capacity_bytes, self._segment_bytes)
        self._media = media
        self._writer = SegmentWriter(media, self._table, self._segment_bytes, self._counters, faults)
        self._scratch = _Scratch()
        self._maintenance = threading.Lock()  # compact, erase, close: one at a time

    def open(self) -> list[tuple[RecordInfo, NvmeRef]]:
        """Find the records that are there. `StoreError` when the media cannot be used."""
        raise NotImplementedError

    def close(self) -> None:
        """Make everything durable. No operation may be under way."""
        raise NotImplementedError

    def erase(self, refs: Iterable[NvmeRef], order: PurgeOrder | None = None) -> None:
        """Drop these and all that the order means, and leave no byte of anything that was dropped."""
        raise NotImplementedError

    def end_purge(self, order: PurgeOrder) -> None:
        """Erase the records that were still being written when the order came, and complete it."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------- write and read

    @property
    def can_write(self) -> bool:
        """Whether writes are allowed: not for a while after a write failed."""
        return self._counters.pause()[0] == 0

    def write(self, image: memoryview, info: RecordInfo) -> NvmeRef:
        """Append a record. `image` is the arena's, of which the payload is taken. `StoreIoError` when the
        disk fails or has failed, `StoreError` when there is no space until the next `compact`."""
        return self.write_run([(image, info)])[0]

    def write_run(self, records: Sequence[tuple[memoryview, RecordInfo]]) -> tuple[NvmeRef, ...]:
        """Append the leading ones of several records with one system call: as many as the segment takes, and
        at least one. Errors as in `write`; then none of them is held."""
        for image, info in records:
            if len(image) != image_bytes(info.num_bytes):
                raise StoreError(f"an image of {len(image)} bytes for a payload of {info.num_bytes}")
        pause_s, reason = self._counters.pause()
        if pause_s:
            self._counters.count(num_refused=1)
            raise StoreIoError(f"writes are suspended for another {pause_s:.1f} s: {reason}")
        return self._writer.append(records, is_copy=False)

    def read(self, ref: NvmeRef, info: RecordInfo, into: memoryview, is_check: bool = False) -> None:
        """Fill the padded payload of the image `into`; its header page is left as it is. The bytes are not
        summed. A read for a check is no hit. `StoreIoError` when the disk fails or another record stands
        there; the contents of `into` are undefined then."""
        found = self._table.find(ref, self._media.pin)
        if found is None:
            raise StoreIoError(f"the record at {ref.offset} of segment {ref.segment} is not held any more")
        segment, ref = found
        num_read = 0
        began_at = self._counters.begin(self._counters.reads)
        try:
            self._read(segment, ref, info, into)
            num_read = ref.num_bytes
        finally:
            self._counters.end_read(began_at, num_read, is_hit=not is_check)
            self._media.unpin(segment)

    def _read(self, segment: Segment, ref: NvmeRef, info: RecordInfo, into: memoryview) -> None:
        """Read a record from a segment that is pinned."""
        if len(into) != ref.num_bytes:
            raise StoreError(f"{len(into)} bytes for an image of {ref.num_bytes}")
        page, payload = self._scratch.page, into[HEADER_BYTES:]
        try:
            self._media.open(segment)
            is_corrupt = self._faults.at("store.nvme.read")
            self._media.read(segment, (page, payload), ref.offset)
        except OSError as error:
            self._counters.count(num_io_errors=1)
            raise io_error("reading", segment.path, error) from error
        if not self._media.is_record(page, info, ref):
            self._counters.count(num_checksum_failures=1)
            raise StoreIoError(f"{segment.path}: at {ref.offset} stands {_described(page)}")
        if is_corrupt:
            payload[0] ^= 1

    # ------------------------------------------------------------------------------- drop and compact

    def drop(self, ref: NvmeRef) -> None:
        """Drop a record, in memory only: a restart may find it again. Does not block."""
        self._table.forget(ref)

    @property
    def needs_compaction(self) -> bool:
        """Whether space is short, so that `compact` is due. False while writes are suspended."""
        return self.can_write and self._table.needs_compaction

    def compact(self, is_wanted: Callable[[RecordInfo], bool]) -> Compacted:
        """Free space, if it is needed, by giving up a segment: one of which most was dropped, else the
        oldest. Those of its records that `is_wanted`, in the first case all, are written again, the newest
        first, up to half a segment. Reads and writes continue during it; the old places remain valid until
        the next call, by which the caller must have taken over the new ones. `StoreIoError` when the disk
        fails: then nothing has changed."""
        with self._maintenance:
            victim = self._table.choose_victim() if self.can_write else None
            if victim is None:
                return Compacted()
            self._media.pin(victim)
            try:
                copies = self._copy(victim, is_wanted)
            finally:
                self._media.unpin(victim)
            self._faults.at("store.compact")
            compacted = self._table.commit(victim, copies)
            self._counters.count(num_evictions=len(compacted.dropped))
            try:
                self._reuse(victim)
            except StoreIoError as error:  # it stays in the table, empty, until a later compaction
                self._counters.failed(error)
            return compacted

    def stat(self) -> TierStat:
        """Return statistics: hits are reads, `num_written_bytes` is all that went to the disk, and refused
        are writes that could not be accepted."""
        return self._counters.stat(self._table.num_bytes, self._capacity_bytes, self._table.num_records)

    def _copy(self, victim: Segment, is_wanted: Callable[[RecordInfo], bool]) -> list[Moved]:
        """Write durable copies of the records that survive."""
        survivors, budget_bytes = [], int(SURVIVING_SHARE * self._segment_bytes)
        keeps_all = self._table.is_mostly_dead(victim)
        for offset, info in sorted(self._table.live(victim), key=lambda entry: entry[0], reverse=True):
            old = NvmeRef(victim.number, offset, image_bytes(info.num_bytes))
            if old.num_bytes <= budget_bytes and (keeps_all or is_wanted(info)):
                budget_bytes -= old.num_bytes
                survivors.append((old, info))
        copies: list[Moved] = []
        try:
            for old, info in reversed(survivors):  # neighbours stay neighbours
                self._faults.at("store.compact")
                image = self._media.image(old.num_bytes)
                try:
                    self._read(victim, old, info, image)
                except StoreIoError:
                    continue  # counted; it is not wanted any more
                try:
                    copies.append(Moved(info, old, self._writer.append([(image, info)], is_copy=True)[0]))
                except StoreIoError:
                    raise
                except StoreError:
                    break  # other writers took the space
            self._writer.sync(self._table.segments({copy.new.segment for copy in copies}))
        except StoreIoError:
            self._table.undo(copies)
            raise
        return copies

    def _reuse(self, victim: Segment) -> None:
        """Reuse the file of a victim, whose blocks are allocated, as the next segment."""
        ready = None
        if victim.num_bytes == self._segment_bytes and self._media.is_unused(victim):
            ready = self._media.rename(victim, self._table.next_number())
        if ready is None:
            self._media.remove(victim)
        self._table.removed(victim)
        if ready is not None:
            self._table.add_ready(ready)
        self._media.sync_folder()


def _described(page: memoryview) -> str:
    """Describe an unexpected header page."""
    try:
        header = decode_header(page)
    except StoreError as error:
        return str(error)
    return f"a record of {header.info.id.key.hex()}"
