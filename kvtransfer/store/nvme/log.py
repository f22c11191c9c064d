"""The NVMe tier of a node: record images appended to segment files with O_DIRECT, found again after restarts.

What a crash may cost: the process's, nothing that `write` returned; the machine's, what the file system had
not yet made durable by itself, a few seconds of writing (only `close`, and `compact` for its copies, wait for
that). Never a wrong byte: a record says what it is and where, and its reader sums it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.config import StoreSettings
from kvtransfer.errors import StoreError, StoreIoError
from kvtransfer.store.messages import RecordInfo, TierStat
from kvtransfer.store.nvme.counters import NvmeCounters
from kvtransfer.store.nvme.recovery import LOCK_NAME, Recovery, direct_flag, lock_folder
from kvtransfer.store.nvme.segment_table import SURVIVING_SHARE, SegmentTable
from kvtransfer.store.nvme.segment_table import Compacted as Compacted
from kvtransfer.store.nvme.segment_table import Moved as Moved
from kvtransfer.store.nvme.segment_writer import SegmentWriter
from kvtransfer.store.nvme.segments import NvmeRef as NvmeRef
from kvtransfer.store.nvme.segments import (
    PageBuffer,
    Segment,
    SegmentFiles,
    clear_directory,
    erase_page,
    io_error,
    is_header_of,
    read_at,
    write_directory,
)
from kvtransfer.store.record import HEADER_BYTES, PAGE_BYTES, decode_header, image_bytes

_log = logging.getLogger(__name__)


class _Scratch(threading.local):
    """Where a thread reads a header page to."""

    def __init__(self) -> None:
        self.page = PageBuffer(PAGE_BYTES).view


class NvmeTier:
    """The segments in the folder `settings.nvme_path`, which is this owner's alone, made when it is missing.
    All methods are thread-safe; all block but for `drop` and what only tells.

    `write` and `read` go straight between the arena and the disk. Every error of the disk is a `StoreIoError`
    that names file and cause; after one in writing, nothing is written for a while (`can_write`), but reads
    go on. Refs are valid until `drop`, `erase`, or a `compact` that says otherwise: it may say so of a record
    before the caller has put down where its `write` put it.
    """

    def __init__(self, settings: StoreSettings, clock: Clock, faults: Faults) -> None:
        self._folder = Path(settings.nvme_path)
        self._capacity_bytes = settings.nvme_bytes
        self._segment_bytes = settings.segment_bytes // PAGE_BYTES * PAGE_BYTES
        self._faults = faults
        self._meters = NvmeCounters(clock)
        self._books = SegmentTable(self._capacity_bytes, self._segment_bytes)
        self._files = SegmentFiles(self._folder, 0)
        self._writer = SegmentWriter(self._files, self._books, self._segment_bytes, self._meters, faults)
        self._scratch = _Scratch()
        self._maintenance = threading.Lock()  # compact, erase, close: one at a time
        self._lock_fd = -1

    # --------------------------------------------------------------------------------- open and close

    def open(self) -> list[tuple[RecordInfo, NvmeRef]]:
        """Take the folder and find what it holds, for all spaces and tenants. `StoreError` when another owner
        has it or the capacity is below two segments, `StoreIoError` when it cannot be used at all."""
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
            self._give_back()
            raise
        if not self._files.flags:
            self._meters.note = "the file system refuses O_DIRECT: the page cache is used"
            _log.warning("%s: %s", self._folder, self._meters.note)
        self._meters.count(num_checksum_failures=recovery.num_damaged, num_io_errors=recovery.num_io_errors)
        self._books.adopt(recovery.segments, recovery.next_number)
        self._shrink()
        self._go_on()
        for segment in self._books.unsealed():
            self._writer.seal(segment)
        found = self._books.records()
        _log.info("%s holds %d records", self._folder, len(found))
        return found

    def close(self) -> None:
        """Make everything durable and give the folder back. Nothing may be under way."""
        with self._maintenance:
            self._writer.end(self._books.begin(None))
            for segment in self._books.unsealed():
                self._writer.seal(segment)
            try:
                self._writer.sync(self._books.segments())
            except StoreIoError as error:
                _log.warning("the newest records may be lost: %s", error)
            self._files.close()
            self._give_back()

    def _give_back(self) -> None:
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _shrink(self) -> None:
        """To the capacity, which may have been larger when the segments were written."""
        while (segment := self._books.oldest_over()) is not None:
            try:
                self._files.remove(segment)
            except StoreIoError as error:
                self._meters.failed(error)
                return
            self._books.removed(segment)

    def _go_on(self) -> None:
        """Write on in the newest segment, if it has room."""
        segment = self._books.newest_segment
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
                self._meters.failed(error)
                return
            segment.is_sealed = False
        self._books.begin(segment)

    # -------------------------------------------------------------------------------- write and read

    @property
    def can_write(self) -> bool:
        """False for a while after a write failed."""
        return self._meters.pause()[0] == 0

    def write(self, image: memoryview, info: RecordInfo) -> NvmeRef:
        """Append a record. `image` is the arena's, of which the payload is taken. `StoreIoError` when the
        disk fails or has failed, `StoreError` when there is no room before the next `compact`."""
        return self.write_run([(image, info)])[0]

    def write_run(self, records: Sequence[tuple[memoryview, RecordInfo]]) -> tuple[NvmeRef, ...]:
        """Append the leading ones of several records with one system call: as many as the segment takes, and
        at least one. Errors as in `write`; then none of them is held."""
        for image, info in records:
            if len(image) != image_bytes(info.num_bytes):
                raise StoreError(f"an image of {len(image)} bytes for a payload of {info.num_bytes}")
        pause_s, reason = self._meters.pause()
        if pause_s:
            self._meters.count(num_refused=1)
            raise StoreIoError(f"nothing is written for another {pause_s:.1f} s: {reason}")
        return self._writer.append(records, is_copy=False)

    def read(self, ref: NvmeRef, info: RecordInfo, into: memoryview, is_check: bool = False) -> None:
        """Fill the padded payload of the image `into`; its header page is left as it is. The bytes are not
        summed. One for a check is no hit. `StoreIoError` when the disk fails or another record stands there;
        what `into` holds is undefined then."""
        found = self._books.find(ref, self._files.pin)
        if found is None:
            raise StoreIoError(f"the record at {ref.offset} of segment {ref.segment} is not held any more")
        segment, ref = found
        num_read = 0
        began_at = self._meters.begin_read()
        try:
            self._read(segment, ref, info, into)
            num_read = ref.num_bytes
        finally:
            self._meters.end_read(began_at, num_read, is_hit=not is_check)
            self._files.unpin(segment)

    def _read(self, segment: Segment, ref: NvmeRef, info: RecordInfo, into: memoryview) -> None:
        """From a segment that is pinned."""
        if len(into) != ref.num_bytes:
            raise StoreError(f"{len(into)} bytes for an image of {ref.num_bytes}")
        page, payload = self._scratch.page, into[HEADER_BYTES:]
        try:
            fd = self._files.fd(segment)
            is_corrupt = self._faults.at("store.nvme.read")
            read_at(fd, (page, payload), ref.offset)
        except OSError as error:
            self._meters.count(num_io_errors=1)
            raise io_error("reading", segment.path, error) from error
        if not is_header_of(page, info, ref.segment, ref.offset):
            self._meters.count(num_checksum_failures=1)
            raise StoreIoError(f"{segment.path}: at {ref.offset} stands {_described(page)}")
        if is_corrupt:
            payload[0] ^= 1

    # ------------------------------------------------------------------------ drop, compact and erase

    def drop(self, ref: NvmeRef) -> None:
        """The record is not held any more. In memory only: a restart may find it again. Does not block."""
        self._books.forget(ref)

    @property
    def needs_compaction(self) -> bool:
        """Soon, or already, nothing more can be written: it is time for `compact`. False while nothing may be
        written."""
        return self.can_write and self._books.needs_compaction

    def compact(self, is_wanted: Callable[[RecordInfo], bool]) -> Compacted:
        """Make room, if it is needed, by giving up the oldest segment. Those of its records that `is_wanted`
        are written again, the newest first, as far as half a segment takes them. Reads and writes go on
        meanwhile; old places serve until the next call, by when the caller must have taken over the new ones.
        `StoreIoError` when the disk fails: then nothing has changed."""
        with self._maintenance:
            victim = self._books.choose_victim() if self.can_write else None
            if victim is None:
                return Compacted()
            self._files.pin(victim)
            try:
                copies = self._copy(victim, is_wanted)
            finally:
                self._files.unpin(victim)
            self._faults.at("store.compact")
            compacted = self._books.commit(victim, copies)
            self._meters.count(num_evictions=len(compacted.dropped))
            try:
                self._reuse(victim)
            except StoreIoError as error:  # it stays in the books, empty, and its turn comes again
                self._meters.failed(error)
            return compacted

    def erase(self, refs: Iterable[NvmeRef]) -> None:
        """Drop these, and let no restart bring back anything that was dropped: when this returns, the headers
        of all such records are overwritten durably. The payloads stay until their segment is used again.
        `StoreIoError` when that fails anywhere; the next call tries again."""
        with self._maintenance:
            for ref in refs:
                self._books.forget(ref)
            errors: list[StoreIoError] = []
            for segment, offsets in self._books.stale():
                try:
                    self._erase(segment, offsets)
                    self._books.erased(segment, offsets)
                except StoreIoError as error:
                    errors.append(error)
            for segment in self._books.unread():
                try:
                    self._files.remove(segment)
                    self._books.removed(segment)
                except StoreIoError as error:
                    errors.append(error)
            try:
                self._files.sync_folder()  # files that were given up held records too
            except StoreIoError as error:
                errors.append(error)
            for each in errors:
                self._meters.failed(each)
            if errors:
                raise errors[0]

    def stat(self) -> TierStat:
        """Hits are reads; `num_written_bytes` is all that went to the disk; refused is what was asked to be
        written while nothing could be."""
        return self._meters.stat(self._books.num_bytes, self._capacity_bytes, self._books.num_records)

    def _copy(self, victim: Segment, is_wanted: Callable[[RecordInfo], bool]) -> list[Moved]:
        """Durable copies of the records that survive."""
        survivors, budget_bytes = [], int(SURVIVING_SHARE * self._segment_bytes)
        for offset, info in sorted(self._books.live(victim), key=lambda entry: entry[0], reverse=True):
            old = NvmeRef(victim.number, offset, image_bytes(info.num_bytes))
            if old.num_bytes <= budget_bytes and is_wanted(info):
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
                    break  # other writers took the room
            self._writer.sync(self._books.segments({copy.new.segment for copy in copies}))
        except StoreIoError:
            self._books.undo(copies)
            raise
        return copies

    def _reuse(self, victim: Segment) -> None:
        """Its records are gone; its file, whose blocks are there, becomes the next segment."""
        ready = None
        if victim.num_bytes == self._segment_bytes and self._files.is_unused(victim):
            ready = self._files.rename(victim, self._books.next_number())
        if ready is None:
            self._files.remove(victim)
        self._books.removed(victim)
        if ready is not None:
            self._books.add_ready(ready)
        self._files.sync_folder()

    def _erase(self, segment: Segment, offsets: Sequence[int]) -> None:
        try:
            with self._files.using(segment, "erasing in") as fd:
                for offset in offsets:
                    erase_page(fd, offset)
                with segment.directory_lock:
                    if segment.is_sealed:
                        write_directory(fd, segment, self._books.directory(segment, offsets))
                os.fdatasync(fd)
        except StoreIoError as error:
            is_removed = (
                isinstance(error.__cause__, FileNotFoundError) and (self._folder / LOCK_NAME).exists()
            )
            if not is_removed:  # else somebody removed the file, and no restart brings it back
                raise


def _described(page: memoryview) -> str:
    """What a header page is that should be another."""
    try:
        header = decode_header(page)
    except StoreError as error:
        return str(error)
    return f"a record of {header.info.id.key.hex()}"
