"""The segment files of one folder: create, rename, open and remove them."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.nvme.page_io import PageBuffer, naming, read_at, write_at
from kvtransfer.store.nvme.segment import Directory, NvmeRef, Segment
from kvtransfer.store.nvme.segment_directory import write_directory
from kvtransfer.store.nvme.segment_headers import header_page, is_header_of
from kvtransfer.store.nvme.segment_media import Images
from kvtransfer.store.nvme.segment_table import MAX_RUN_RECORDS
from kvtransfer.store.record import HEADER_BYTES, PAGE_BYTES

SUFFIX = ".seg"
# Files that stay open though nobody reads or writes them.
MAX_IDLE_FILES = 256
# The unit of `st_blocks`.
_BLOCK_BYTES = 512


def segment_name(number: int) -> str:
    return f"{number:010d}{SUFFIX}"


def segment_number(path: Path) -> int | None:
    """Return the number in the name of a segment file; None: the file is none."""
    number = int(path.stem) if path.stem.isascii() and path.stem.isdigit() and len(path.stem) == 10 else None
    return number if path.suffix == SUFFIX else None


class _Headers(threading.local):
    """Buffers of each thread for the header pages of one run."""

    def __init__(self) -> None:
        view = PageBuffer(MAX_RUN_RECORDS * PAGE_BYTES).view
        self.pages = [view[start : start + PAGE_BYTES] for start in range(0, len(view), PAGE_BYTES)]


class SegmentFiles:
    """The files of one folder: creates, renames and removes them, opens them for use, and closes some of the
    idle ones. Thread-safe. The `kvtransfer.store.nvme.segment_media.SegmentMedia` of nodes."""

    def __init__(self, folder: Path, flags: int) -> None:
        self.folder = folder
        # Beside O_RDWR: `os.O_DIRECT` where the file system takes it.
        self.flags = flags
        self._lock = threading.Lock()  # never held during a system call: an event loop waits for it
        self._idle: OrderedDict[int, Segment] = OrderedDict()
        self._headers = _Headers()

    def create(self, number: int, num_bytes: int) -> Segment:
        """Create a file and allocate its blocks at once, so that a full disk shows here and not later."""
        path = self.folder / segment_name(number)
        with naming("creating", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, num_bytes)
            except OSError:
                with suppress(OSError):
                    path.unlink()
                raise
            finally:
                os.close(fd)
        return Segment(number, path, num_bytes)

    def pin(self, segment: Segment) -> None:
        """Keep the file open, once it is, until `unpin`."""
        with self._lock:
            segment.num_users += 1
            self._idle.pop(segment.number, None)

    def unpin(self, segment: Segment) -> None:
        to_close = []
        with self._lock:
            segment.num_users -= 1
            if segment.num_users == 0 and segment.fd >= 0:
                self._idle[segment.number] = segment
                if segment.is_gone or len(self._idle) > MAX_IDLE_FILES:
                    closing = segment if segment.is_gone else next(iter(self._idle.values()))
                    del self._idle[closing.number]
                    to_close.append(closing.fd)
                    closing.fd = -1
        for fd in to_close:
            os.close(fd)

    def fd(self, segment: Segment) -> int:
        """Return the descriptor of a pinned segment; `OSError` when it cannot be opened."""
        if segment.fd >= 0:
            return segment.fd
        with segment.open_lock:
            if segment.fd < 0:
                try:
                    segment.fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC | self.flags)
                except OSError as error:
                    if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                        raise
                    segment.fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | self.flags)
            return segment.fd

    @contextmanager
    def using(self, segment: Segment, doing: str) -> Iterator[int]:
        """Hold the descriptor open; every `OSError` inside becomes a `StoreIoError`."""
        self.pin(segment)
        try:
            with naming(doing, segment.path):
                yield self.fd(segment)
        finally:
            self.unpin(segment)

    def remove(self, segment: Segment) -> None:
        """Delete the file; users that have it pinned can continue."""
        with naming("removing", segment.path), suppress(FileNotFoundError):
            segment.path.unlink()
        self.retire(segment)

    def rename(self, segment: Segment, number: int) -> Segment | None:
        """Reuse the file of an unused segment as an empty segment of another number; None when the file is
        gone, its size has changed, or not all of its blocks are allocated."""
        path = self.folder / segment_name(number)
        with naming("renaming", segment.path):
            try:
                found = segment.path.stat()
                if found.st_size != segment.num_bytes or found.st_blocks * _BLOCK_BYTES < found.st_size:
                    return None
                segment.path.rename(path)
            except FileNotFoundError:
                return None
        self.retire(segment)
        return Segment(number, path, segment.num_bytes, has_remains=True)

    def retire(self, segment: Segment) -> None:
        """Close the file as soon as it is unused."""
        segment.is_gone = True
        self.pin(segment)
        self.unpin(segment)

    def is_unused(self, segment: Segment) -> bool:
        """Whether the segment is not pinned."""
        with self._lock:
            return segment.num_users == 0

    def close(self) -> None:
        """Close every unused file."""
        with self._lock:
            fds = [segment.fd for segment in self._idle.values()]
            for segment in self._idle.values():
                segment.fd = -1
            self._idle.clear()
        for fd in fds:
            os.close(fd)

    def sync_folder(self) -> None:
        """Make renames and removals durable; `StoreIoError` when that fails."""
        with naming("syncing", self.folder):
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    # ------------------------------------------------------------------------------------------ bytes

    def open(self, segment: Segment) -> None:
        """Open a pinned segment, if it is not. `OSError`."""
        self.fd(segment)

    def image(self, num_bytes: int) -> memoryview:
        """Return memory for an image of a record that is copied."""
        return PageBuffer(num_bytes).view

    def buffers(self, refs: Sequence[NvmeRef], records: Images) -> list[memoryview]:
        """Return the header pages and payloads of the leading records, for these places. The pages are this
        thread's, until its next call."""
        buffers: list[memoryview] = []
        for ref, (image, info), page in zip(refs, records, self._headers.pages, strict=False):
            page[:] = header_page(info, ref.segment, ref.offset)
            buffers += (page, image[HEADER_BYTES:])
        return buffers

    def write(self, segment: Segment, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all buffers to a pinned segment, with one system call. `OSError`."""
        write_at(self.fd(segment), buffers, offset)

    def read(self, segment: Segment, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all buffers from a pinned segment, with one system call. `OSError`."""
        read_at(self.fd(segment), buffers, offset)

    def is_record(self, page: memoryview, info: RecordInfo, ref: NvmeRef) -> bool:
        """Whether the page is the header of that record at that place."""
        return is_header_of(page, info, ref.segment, ref.offset)

    def write_directory(self, segment: Segment, directory: Directory) -> int:
        """Write the directory of a segment; return its bytes. `StoreIoError`."""
        with self.using(segment, "sealing") as fd:
            return write_directory(fd, segment, directory)

    def sync(self, segment: Segment) -> None:
        """Make all that was written to a segment durable. `StoreIoError`."""
        with self.using(segment, "syncing") as fd:
            os.fdatasync(fd)
