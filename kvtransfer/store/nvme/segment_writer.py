"""Append records to segments: reserve space, write with one system call, seal full segments."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvtransfer.common.faults import Faults
from kvtransfer.errors import StoreError, StoreIoError
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.nvme.counters import NvmeCounters
from kvtransfer.store.nvme.page_io import PageBuffer, io_error
from kvtransfer.store.nvme.segment import NvmeRef, Segment
from kvtransfer.store.nvme.segment_media import Images, SegmentMedia
from kvtransfer.store.nvme.segment_table import Reservation, SegmentTable
from kvtransfer.store.nvme.write_gate import WriteGate
from kvtransfer.store.record import HEADER_BYTES, PAGE_BYTES, image_bytes


class SegmentWriter:
    """Writes records for any number of threads at once, and counts failures."""

    def __init__(
        self,
        media: SegmentMedia,
        table: SegmentTable,
        segment_bytes: int,
        counters: NvmeCounters,
        faults: Faults,
    ) -> None:
        self._media = media
        self._table = table
        self._segment_bytes = segment_bytes
        self._counters = counters
        self._faults = faults
        self._growing = threading.Lock()
        self._gate = WriteGate()

    def append(self, records: Images, *, is_copy: bool) -> tuple[NvmeRef, ...]:
        """Write the leading records, as many as the segment takes and at least one. `StoreIoError` when the
        disk fails, `StoreError` when there is no space; then none of them is held."""
        with self._gate.writing():
            return self._append(records, is_copy=is_copy)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep all threads from appending within the context, and wait for those that do."""
        with self._gate.closed():
            yield

    def _append(self, records: Images, *, is_copy: bool) -> tuple[NvmeRef, ...]:
        infos = [info for _, info in records]
        reservation = self._reserve(infos, is_copy=is_copy)
        is_written = False
        try:
            self._write(reservation, records, is_copy=is_copy)
            is_written = True
        except StoreIoError as error:
            self._counters.failed(error)
            if isinstance(error.__cause__, FileNotFoundError):  # somebody removed it: the next one is new
                self._table.give_up(reservation.segment)
            raise
        finally:
            written = infos[: len(reservation.refs)] if is_written else None
            if self._table.leave(reservation, written, is_copy=is_copy):
                self.end(reservation.segment)
        return reservation.refs

    def end(self, segment: Segment | None) -> None:
        """Seal a segment that the table returned for sealing, if any."""
        if segment is not None:
            self.seal(segment)
            self._table.sealed(segment)

    def seal(self, segment: Segment) -> None:
        """Write its directory. Without it, the next start reads the whole segment, so failures are only
        counted."""
        if not segment.takes_directory:
            return
        try:
            with segment.directory_lock:
                num_bytes = self._media.write_directory(segment, self._table.directory(segment))
                segment.is_sealed = segment.is_dirty = True
            self._counters.count(num_written_bytes=num_bytes)
        except StoreIoError as error:
            self._counters.failed(error)

    def sync(self, segments: Iterable[Segment]) -> None:
        """Make the bytes written to them durable; `StoreIoError` when that is not sure."""
        for segment in segments:
            if not segment.is_dirty:
                continue
            segment.is_dirty = False
            try:
                self._media.sync(segment)
            except StoreIoError as error:
                segment.is_dirty = True
                self._counters.failed(error)
                raise

    def _reserve(self, infos: Sequence[RecordInfo], *, is_copy: bool) -> Reservation:
        while (reservation := self._table.reserve(infos)) is None:
            full = self._table.open_segment
            before = None
            with self._growing:
                if self._table.open_segment is full:  # else another thread has begun one
                    before = self._table.begin(self._new_segment(infos[0], is_copy=is_copy))
            self.end(before)
        return reservation

    def _new_segment(self, first: RecordInfo, *, is_copy: bool) -> Segment:
        """Return an empty segment in which `first` fits."""
        num_bytes = image_bytes(first.num_bytes)
        if Segment(0, self._media.folder, self._segment_bytes).take(num_bytes, first) is None:
            raise StoreError(
                f"a record of {num_bytes} bytes does not fit in a segment of {self._segment_bytes}"
            )
        if not self._table.may_grow(is_copy=is_copy):
            self._counters.count(num_refused=1)
            raise StoreError(f"{self._media.folder} is full until the next compaction")
        ready = self._table.take_ready()
        if ready is not None:
            return ready
        try:
            return self._media.create(self._table.next_number(), self._segment_bytes)
        except StoreIoError as error:
            self._counters.failed(error)
            raise

    def _write(self, reservation: Reservation, records: Images, *, is_copy: bool) -> None:
        segment = reservation.segment
        buffers = self._media.buffers(reservation.refs, records)
        num_bytes = sum(ref.num_bytes for ref in reservation.refs)
        num_written = 0
        self._media.pin(segment)
        began_at = self._counters.begin(self._counters.writes)
        try:
            self._media.open(segment)
            is_corrupt = self._faults.at("store.nvme.write")
            segment.is_dirty = True
            self._media.write(segment, buffers, reservation.refs[0].offset)
            if is_corrupt:
                _flip_bit(self._media, segment, reservation.refs[0].offset + HEADER_BYTES)
            num_written = num_bytes
        except OSError as error:
            raise io_error("writing to", segment.path, error) from error
        finally:
            self._counters.end_write(began_at, num_written, is_put=not is_copy)
            self._media.unpin(segment)


def _flip_bit(media: SegmentMedia, segment: Segment, offset: int) -> None:
    page = PageBuffer(PAGE_BYTES).view
    media.read(segment, [page], offset)
    page[0] ^= 1
    media.write(segment, [page], offset)
