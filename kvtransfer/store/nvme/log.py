"""The NVMe tier of a node: record images appended to segment files with O_DIRECT, found again after restarts.

A crash of the process loses nothing that `write` returned. A crash of the machine loses what the file system
had not yet made durable by itself, a few seconds of writing (only `close`, and `compact` for its copies, wait
for that). Neither yields a wrong byte: a record names itself and its place, and readers verify its checksum.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.config import StoreSettings
from kvtransfer.errors import StoreError, StoreIoError
from kvtransfer.store.messages.admin_requests import TierStat
from kvtransfer.store.messages.records import PurgeOrder, RecordInfo
from kvtransfer.store.nvme.counters import NvmeCounters
from kvtransfer.store.nvme.erasure import PurgeJournal, clear_range, gaps_between
from kvtransfer.store.nvme.page_io import PageBuffer, io_error, read_at
from kvtransfer.store.nvme.recovery import LOCK_NAME, Recovery, direct_flag, lock_folder
from kvtransfer.store.nvme.segment import NvmeRef as NvmeRef
from kvtransfer.store.nvme.segment import Segment
from kvtransfer.store.nvme.segment_directory import clear_directory, write_directory
from kvtransfer.store.nvme.segment_files import SegmentFiles
from kvtransfer.store.nvme.segment_headers import is_header_of
from kvtransfer.store.nvme.segment_table import SURVIVING_SHARE, SegmentTable
from kvtransfer.store.nvme.segment_table import Compacted as Compacted
from kvtransfer.store.nvme.segment_table import Moved as Moved
from kvtransfer.store.nvme.segment_writer import SegmentWriter
from kvtransfer.store.record import HEADER_BYTES, PAGE_BYTES, decode_header, image_bytes

_log = logging.getLogger(__name__)


class _Scratch(threading.local):
    """A buffer of each thread for one header page."""

    def __init__(self) -> None:
        self.page = PageBuffer(PAGE_BYTES).view


class NvmeTier:
    """The segments in the folder `settings.nvme_path`, created if missing, which one owner has to itself.
    All methods are thread-safe; all may block, except `drop` and the queries.

    `write` and `read` go straight between the arena and the disk. Every error of the disk is a `StoreIoError`
    that names file and cause; after a failed write, writes are suspended for a while (`can_write`), reads
    continue. Refs are valid until `drop`, `erase`, or a `compact` that reports otherwise, perhaps before the
    caller has recorded the result of `write`.
    """

    def __init__(self, settings: StoreSettings, clock: Clock, faults: Faults) -> None:
        self._folder = Path(settings.nvme_path)
        self._capacity_bytes = settings.nvme_bytes
        self._segment_bytes = settings.segment_bytes // PAGE_BYTES * PAGE_BYTES
        self._faults = faults
        self._counters = NvmeCounters(clock)
        self._table = SegmentTable(self._capacity_bytes, self._segment_bytes)
        self._files = SegmentFiles(self._folder, 0)
        self._writer = SegmentWriter(self._files, self._table, self._segment_bytes, self._counters, faults)
        self._scratch = _Scratch()
        self._journal = PurgeJournal(self._folder)
        self._maintenance = threading.Lock()  # compact, erase, close: one at a time
        self._lock_fd = -1

    # --------------------------------------------------------------------------------- open and close

    def open(self) -> list[tuple[RecordInfo, NvmeRef]]:
        """Lock the folder, complete the purges that were interrupted, and find the records, of all spaces and
        groups. `StoreError` when another owner has the folder or the capacity is below two segments,
        `StoreIoError` when it cannot be used at all."""
        if self._capacity_bytes < 2 * self._segment_bytes:
            raise StoreError(
                f"{self._capacity_bytes} bytes are less than two segments of {self._segment_bytes}"
            )
        self._lock_fd = lock_folder(self._folder)
        try:
            self._files.flags = direct_flag(self._folder)
            recovery = Recovery(self._files, self._segment_bytes, self._faults)
            recovery.run()
        except StoreError:
            self._release_folder()
            raise
        if not self._files.flags:
            self._counters.note = "the file system refuses O_DIRECT: the page cache is used"
            _log.warning("%s: %s", self._folder, self._counters.note)
        self._counters.count(num_checksum_failures=recovery.num_damaged, num_io_errors=recovery.num_io_errors)
        self._table.adopt(recovery.segments, recovery.next_number)
        self._shrink()
        self._complete_purges()
        self._resume()
        for segment in self._table.unsealed():
            self._writer.seal(segment)
        found = self._table.records()
        _log.info("%s holds %d records", self._folder, len(found))
        return found

    def close(self) -> None:
        """Make everything durable and release the folder. No operation may be under way."""
        with self._maintenance:
            self._writer.end(self._table.begin(None))
            for segment in self._table.unsealed():
                self._writer.seal(segment)
            try:
                self._writer.sync(self._table.segments())
            except StoreIoError as error:
                _log.warning("the newest records may be lost: %s", error)
            self._files.close()
            self._release_folder()

    def _release_folder(self) -> None:
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _shrink(self) -> None:
        """Remove segments beyond the capacity, which may have been larger when they were written."""
        while (segment := self._table.oldest_over()) is not None:
            try:
                self._files.remove(segment)
            except StoreIoError as error:
                self._counters.failed(error)
                return
            self._table.removed(segment)

    def _complete_purges(self) -> None:
        """Complete the interrupted purges; where the disk refuses that, the records are not found all the
        same."""
        orders = self._journal.read()
        if not orders:
            return
        for order in orders:
            self._forget_all(order)
        try:
            self._erase_dead()
            self._journal.write(())
        except StoreIoError as error:
            _log.error("what was purged is still on the disk: %s", error)

    def _resume(self) -> None:
        """Continue in the newest segment, if it has free space."""
        segment = self._table.newest_segment
        if (
            segment is None
            or segment.is_unread
            or not segment.takes_directory
            or not segment.num_unused_bytes
        ):
            return
        if segment.is_sealed:
            try:
                with self._files.using(segment, "writing to") as fd:
                    clear_directory(fd, segment)
            except StoreIoError as error:  # perhaps read-only: what it holds can be read all the same
                self._counters.failed(error)
                return
            segment.is_sealed = False
        self._table.begin(segment)

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
        found = self._table.find(ref, self._files.pin)
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
            self._files.unpin(segment)

    def _read(self, segment: Segment, ref: NvmeRef, info: RecordInfo, into: memoryview) -> None:
        """Read a record from a segment that is pinned."""
        if len(into) != ref.num_bytes:
            raise StoreError(f"{len(into)} bytes for an image of {ref.num_bytes}")
        page, payload = self._scratch.page, into[HEADER_BYTES:]
        try:
            fd = self._files.fd(segment)
            is_corrupt = self._faults.at("store.nvme.read")
            read_at(fd, (page, payload), ref.offset)
        except OSError as error:
            self._counters.count(num_io_errors=1)
            raise io_error("reading", segment.path, error) from error
        if not is_header_of(page, info, ref.segment, ref.offset):
            self._counters.count(num_checksum_failures=1)
            raise StoreIoError(f"{segment.path}: at {ref.offset} stands {_described(page)}")
        if is_corrupt:
            payload[0] ^= 1

    # ------------------------------------------------------------------------ drop, compact and erase

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
            self._files.pin(victim)
            try:
                copies = self._copy(victim, is_wanted)
            finally:
                self._files.unpin(victim)
            self._faults.at("store.compact")
            compacted = self._table.commit(victim, copies)
            self._counters.count(num_evictions=len(compacted.dropped))
            try:
                self._reuse(victim)
            except StoreIoError as error:  # it stays in the table, empty, until a later compaction
                self._counters.failed(error)
            return compacted

    def erase(self, refs: Iterable[NvmeRef], order: PurgeOrder | None = None) -> None:
        """Drop these and all that the order means, and leave no byte of anything that was dropped in any
        file: when this returns, all that lies between the records that are held reads as zeros, durably.
        Writes wait until then. An order is completed by the next `open` when the process dies before
        `end_purge`. `StoreIoError` when anything fails; the next call tries again."""
        with self._maintenance:
            if order is not None:
                try:
                    self._journal.write((*self._journal.read(), order))
                except StoreIoError as error:  # perhaps the disk is full
                    _log.warning("a purge that is interrupted now would not be completed: %s", error)
            with self._writer.stopped():
                for ref in refs:
                    self._table.forget(ref)
                if order is not None:
                    self._forget_all(order)
                self._erase_dead()

    def end_purge(self, order: PurgeOrder) -> None:
        """Erase the records that were still being written when the order came, and complete it. Errors as of
        `erase`."""
        with self._maintenance:
            with self._writer.stopped():
                self._erase_dead()
            orders = self._journal.read()
            if order in orders:
                self._journal.write([each for each in orders if each != order])

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
                image = PageBuffer(old.num_bytes).view
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
        if victim.num_bytes == self._segment_bytes and self._files.is_unused(victim):
            ready = self._files.rename(victim, self._table.next_number())
        if ready is None:
            self._files.remove(victim)
        self._table.removed(victim)
        if ready is not None:
            self._table.add_ready(ready)
        self._files.sync_folder()

    def _forget_all(self, order: PurgeOrder) -> None:
        for info, ref in self._table.records():
            if order.includes(info):
                self._table.forget(ref)

    def _erase_dead(self) -> None:
        """Erase all bytes that are not held from all files, while there are no writers; raise the first
        error, at the end."""
        errors: list[StoreIoError] = []
        for segment in self._table.with_remains():
            try:
                self._erase(segment)
            except StoreIoError as error:
                errors.append(error)
        for segment in self._table.unread():
            try:
                self._files.remove(segment)
                self._table.removed(segment)
            except StoreIoError as error:
                errors.append(error)
        try:
            self._files.sync_folder()  # files that were given up held records too
        except StoreIoError as error:
            errors.append(error)
        for each in errors:
            self._counters.failed(each)
        if errors:
            raise errors[0]

    def _erase(self, segment: Segment) -> None:
        """Erase all that lies between the live records of a segment, and before a directory that names these
        alone."""
        live, stale = self._table.begin_erasing(segment)
        is_erased = False
        try:
            with self._files.using(segment, "erasing in") as fd, segment.directory_lock:
                self._faults.at("store.erase")
                _cut_to_pages(fd, segment)
                end = segment.num_bytes
                if segment.is_sealed:
                    end -= write_directory(fd, segment, self._table.directory(segment, stale))
                for start, stop in gaps_between(live, end):
                    self._faults.at("store.erase")
                    clear_range(fd, start, stop)
                if not segment.is_sealed:  # it may get more records
                    with suppress(OSError):  # else a full disk shows when they are written
                        os.posix_fallocate(fd, segment.end, segment.num_bytes - segment.end)
                os.fsync(fd)
            is_erased = True
        except StoreIoError as error:
            is_erased = isinstance(error.__cause__, FileNotFoundError) and (self._folder / LOCK_NAME).exists()
            if not is_erased:  # else somebody removed the file, and no restart brings it back
                raise
        finally:
            self._table.end_erasing(segment, stale if is_erased else None)


def _cut_to_pages(fd: int, segment: Segment) -> None:
    """Remove the bytes behind the last whole page of a file that was cut: no record ends there."""
    if segment.num_bytes % PAGE_BYTES:
        segment.num_bytes -= segment.num_bytes % PAGE_BYTES
        os.ftruncate(fd, segment.num_bytes)


def _described(page: memoryview) -> str:
    """Describe an unexpected header page."""
    try:
        header = decode_header(page)
    except StoreError as error:
        return str(error)
    return f"a record of {header.info.id.key.hex()}"
