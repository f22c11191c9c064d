"""Appends records to segments: reserves, writes with one system call, seals what is full."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

from kvtransfer.common.faults import Faults
from kvtransfer.errors import StoreError, StoreIoError
from kvtransfer.store.messages import RecordInfo
from kvtransfer.store.nvme.counters import NvmeCounters
from kvtransfer.store.nvme.segment_table import MAX_RUN_RECORDS, Room, SegmentTable
from kvtransfer.store.nvme.segments import (
    NvmeRef,
    PageBuffer,
    Segment,
    SegmentFiles,
    header_page,
    io_error,
    read_at,
    write_at,
    write_directory,
)
from kvtransfer.store.record import HEADER_BYTES, PAGE_BYTES, image_bytes

# Whole, page-aligned images; their header pages are not looked at.
Images = Sequence[tuple[memoryview, RecordInfo]]


class _Headers(threading.local):
    """The header pages of one run, for each thread."""

    def __init__(self) -> None:
        view = PageBuffer(MAX_RUN_RECORDS * PAGE_BYTES).view
        self.pages = [view[start : start + PAGE_BYTES] for start in range(0, len(view), PAGE_BYTES)]


class SegmentWriter:
    """Any number of threads may write at once. Failures are counted here."""

    def __init__(
        self,
        files: SegmentFiles,
        books: SegmentTable,
        segment_bytes: int,
        meters: NvmeCounters,
        faults: Faults,
    ) -> None:
        self._files = files
        self._books = books
        self._segment_bytes = segment_bytes
        self._meters = meters
        self._faults = faults
        self._growing = threading.Lock()
        self._headers = _Headers()

    def append(self, records: Images, *, is_copy: bool) -> tuple[NvmeRef, ...]:
        """Write the leading records, as many as the segment takes and at least one. `StoreIoError` when the
        disk fails, `StoreError` when there is no room; then none of them is held."""
        infos = [info for _, info in records]
        room = self._room(infos, is_copy=is_copy)
        is_written = False
        try:
            self._write(room, records, is_copy=is_copy)
            is_written = True
        except StoreIoError as error:
            self._meters.failed(error)
            if isinstance(error.__cause__, FileNotFoundError):  # somebody removed it: the next one is new
                self._books.give_up(room.segment)
            raise
        finally:
            written = infos[: len(room.refs)] if is_written else None
            if self._books.leave(room, written, is_copy=is_copy):
                self.end(room.segment)
        return room.refs

    def end(self, segment: Segment | None) -> None:
        """Seal a segment that the books say is to be sealed, if any."""
        if segment is not None:
            self.seal(segment)
            self._books.sealed(segment)

    def seal(self, segment: Segment) -> None:
        """Write its directory. Without it the segment is read whole at the next start: no reason to fail."""
        if not segment.takes_directory:
            return
        try:
            with segment.directory_lock, self._files.using(segment, "sealing") as fd:
                num_bytes = write_directory(fd, segment, self._books.directory(segment))
                segment.is_sealed = segment.is_dirty = True
            self._meters.count(num_written_bytes=num_bytes)
        except StoreIoError as error:
            self._meters.failed(error)

    def sync(self, segments: Iterable[Segment]) -> None:
        """Make what was written to them durable; `StoreIoError` when that is not sure."""
        for segment in segments:
            if not segment.is_dirty:
                continue
            segment.is_dirty = False
            try:
                with self._files.using(segment, "syncing") as fd:
                    os.fdatasync(fd)
            except StoreIoError as error:
                segment.is_dirty = True
                self._meters.failed(error)
                raise

    def _room(self, infos: Sequence[RecordInfo], *, is_copy: bool) -> Room:
        while (room := self._books.reserve(infos)) is None:
            full = self._books.open_segment
            before = None
            with self._growing:
                if self._books.open_segment is full:  # else another thread has begun one meanwhile
                    before = self._books.begin(self._new_segment(infos[0], is_copy=is_copy))
            self.end(before)
        return room

    def _new_segment(self, first: RecordInfo, *, is_copy: bool) -> Segment:
        """An empty one, in which `first` fits."""
        num_bytes = image_bytes(first.num_bytes)
        if Segment(0, self._files.folder, self._segment_bytes).take(num_bytes, first) is None:
            raise StoreError(
                f"a record of {num_bytes} bytes does not fit in a segment of {self._segment_bytes}"
            )
        if not self._books.may_grow(is_copy=is_copy):
            self._meters.count(num_refused=1)
            raise StoreError(f"{self._files.folder} is full until the next compaction")
        ready = self._books.take_ready()
        if ready is not None:
            return ready
        try:
            return self._files.create(self._books.next_number(), self._segment_bytes)
        except StoreIoError as error:
            self._meters.failed(error)
            raise

    def _write(self, room: Room, records: Images, *, is_copy: bool) -> None:
        segment = room.segment
        buffers: list[memoryview] = []
        num_bytes = 0
        for ref, (image, info), page in zip(room.refs, records, self._headers.pages, strict=False):
            page[:] = header_page(info, ref.segment, ref.offset)
            buffers += (page, image[HEADER_BYTES:])
            num_bytes += ref.num_bytes
        num_written = 0
        self._files.pin(segment)
        began_at = self._meters.begin_write()
        try:
            fd = self._files.fd(segment)
            is_corrupt = self._faults.at("store.nvme.write")
            segment.is_dirty = True
            write_at(fd, buffers, room.refs[0].offset)
            if is_corrupt:
                _flip_bit(fd, room.refs[0].offset + HEADER_BYTES)
            num_written = num_bytes
        except OSError as error:
            raise io_error("writing to", segment.path, error) from error
        finally:
            self._meters.end_write(began_at, num_written, is_put=not is_copy)
            self._files.unpin(segment)


def _flip_bit(fd: int, offset: int) -> None:
    page = PageBuffer(PAGE_BYTES).view
    read_at(fd, [page], offset)
    page[0] ^= 1
    write_at(fd, [page], offset)
