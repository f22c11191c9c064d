"""The NVMe tier of a node: record images appended to segment files with O_DIRECT, found again after restarts.

A crash of the process loses nothing that `write` returned. A crash of the machine loses what the file system
had not yet made durable by itself, a few seconds of writing (only `close`, and `compact` for its copies, wait
for that). Neither yields a wrong byte: a record names itself and its place, and readers verify its checksum.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.config import StoreSettings
from kvtransfer.errors import StoreError, StoreIoError
from kvtransfer.store.messages.records import PurgeOrder, RecordInfo
from kvtransfer.store.nvme.erasure import PurgeJournal, clear_range, gaps_between
from kvtransfer.store.nvme.recovery import LOCK_NAME, Recovery, direct_flag, lock_folder
from kvtransfer.store.nvme.segment import NvmeRef as NvmeRef
from kvtransfer.store.nvme.segment import Segment
from kvtransfer.store.nvme.segment_directory import clear_directory, write_directory
from kvtransfer.store.nvme.segment_files import SegmentFiles
from kvtransfer.store.nvme.segment_table import Compacted as Compacted
from kvtransfer.store.nvme.segment_table import Moved as Moved
from kvtransfer.store.nvme.segmented_log import SegmentedLog
from kvtransfer.store.record import PAGE_BYTES

_log = logging.getLogger(__name__)


class NvmeTier(SegmentedLog):
    """The segments in the folder `settings.nvme_path`, created if missing, which one owner has to itself."""

    def __init__(self, settings: StoreSettings, clock: Clock, faults: Faults) -> None:
        self._folder = Path(settings.nvme_path)
        self._files = SegmentFiles(self._folder, 0)
        super().__init__(settings.nvme_bytes, settings.segment_bytes, self._files, clock, faults)
        self._journal = PurgeJournal(self._folder)
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
