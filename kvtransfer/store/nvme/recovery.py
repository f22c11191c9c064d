"""Finds the records in a folder of segments when its owner starts: from directories, or page by page.

A record of a segment without a directory counts when its header is in its place and its whole payload has the
right checksum, which drops what a crash cut off. Files that are not segments are left alone.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from kvtransfer.blocks.checksum import Checksummer
from kvtransfer.common.faults import Faults
from kvtransfer.errors import OtherVersionError, StoreError, StoreIoError
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.nvme.erasure import JOURNAL_NAMES
from kvtransfer.store.nvme.page_io import PageBuffer, naming
from kvtransfer.store.nvme.segment import Directory, Segment
from kvtransfer.store.nvme.segment_directory import read_directory
from kvtransfer.store.nvme.segment_files import SegmentFiles, segment_number
from kvtransfer.store.nvme.segment_headers import place_of
from kvtransfer.store.record import HEADER_BYTES, PAGE_BYTES, Header, decode_header, image_bytes

LOCK_NAME = "lock"
_WINDOW_BYTES = 1 << 20
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)

_log = logging.getLogger(__name__)


def lock_folder(folder: Path) -> int:
    """Take the folder, made when it is missing, for this process; closing the descriptor gives it back.
    `StoreError` when another owner has it, `StoreIoError`."""
    path = folder / LOCK_NAME
    with naming("locking", path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # read-only: what it holds can still be read
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 20, 0).decode(errors="replace")
        os.close(fd)
        raise StoreError(f"{folder} is used by another owner, process {holder or '?'}") from None
    except OSError as error:
        _log.warning(
            "the lock of %s names no process: %s", folder, error
        )  # a full disk; it is ours all the same
    return fd


def direct_flag(folder: Path) -> int:
    """Return `os.O_DIRECT` where the folder's file system takes it, else 0."""
    with naming("opening", folder / LOCK_NAME):
        try:
            os.close(os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0
    return os.O_DIRECT


class Recovery:
    """Reads all segments of a folder. `segments` are in the order of their numbers and hold their records;
    those without any are deleted where that is allowed."""

    def __init__(self, files: SegmentFiles, segment_bytes: int, faults: Faults) -> None:
        self.segments: list[Segment] = []
        self.next_number = 1
        # Damaged records, including torn ones.
        self.num_damaged = 0
        self.num_io_errors = 0
        self._files = files
        self._segment_bytes = segment_bytes
        self._faults = faults

    def run(self) -> None:
        """Read the folder. `StoreIoError` when it cannot be listed; errors of one file are logged and
        counted."""
        with naming("listing", self._files.folder):
            paths = sorted(self._files.folder.iterdir())
        for path in paths:
            number = segment_number(path)
            if number is not None and path.is_file() and not path.is_symlink():
                self.next_number = max(self.next_number, number + 1)
                self._recover(number, path)
            elif path.name != LOCK_NAME and path.name not in JOURNAL_NAMES:
                _log.warning("%s is none of the store's files: it is left alone", path)

    def _recover(self, number: int, path: Path) -> None:
        self._faults.at("store.recover")
        segment = Segment(number, path, 0)
        try:
            with naming("reading", path):
                segment.num_bytes = path.stat().st_size
            self._read(segment)
            is_wanted = bool(segment.live)
        except OtherVersionError as error:
            _log.warning("deleted: %s", error)
            is_wanted = False
        except StoreIoError as error:
            # Its records are lost, its space is not: it stays in the table until a compaction gives it up.
            _log.warning("nothing of a segment can be used: %s", error)
            self.num_io_errors += 1
            segment.is_unread = is_wanted = True
        if is_wanted:
            self.segments.append(segment)
            return
        try:
            self._files.remove(segment)
        except StoreIoError as error:
            _log.warning("a segment without records stays: %s", error)
            self.num_io_errors += 1
            self.segments.append(segment)

    def _read(self, segment: Segment) -> None:
        """Set `live`, `end` and `is_sealed`."""
        with self._files.using(segment, "reading") as fd:
            directory = read_directory(fd, segment)
            segment.is_sealed = directory is not None
            if directory is None:
                self._grow(fd, segment)
                directory = self._scan(fd, segment)
        segment.adopt(directory)

    def _grow(self, fd: int, segment: Segment) -> None:
        """Restore the size of a file that was cut, if possible, so that it can be filled and sealed."""
        try:
            if segment.num_bytes < self._segment_bytes:
                os.posix_fallocate(fd, 0, self._segment_bytes)
                segment.num_bytes = self._segment_bytes
        except OSError as error:
            _log.warning("%s is cut and stays so: %s", segment.path, error)
            segment.is_full = True

    def _scan(self, fd: int, segment: Segment) -> Directory:
        """Look at every page where a record may start."""
        window = _Window(fd, segment)
        found: list[tuple[int, RecordInfo]] = []
        offset, num_other = 0, 0
        while offset + HEADER_BYTES <= segment.num_bytes:
            try:
                header = window.header(offset)
            except OtherVersionError:
                num_other += 1
                header = None
            if header is None:
                offset += PAGE_BYTES
                continue
            # Right or not: from here to its end was written in this segment's time.
            segment.end = min(
                max(segment.end, offset + image_bytes(header.info.num_bytes)), segment.num_bytes
            )
            if window.is_whole(offset, header.info):
                found.append((offset, header.info))
                offset += image_bytes(header.info.num_bytes)
            else:
                self.num_damaged += 1
                offset += PAGE_BYTES
        if num_other and not found:
            raise OtherVersionError(f"{segment.path} holds {num_other} records of another version")
        return Directory(found, [])


class _Window:
    """Reads a file in large pieces, for a look at any page."""

    def __init__(self, fd: int, segment: Segment) -> None:
        self._fd = fd
        self._segment = segment
        self._buffer = PageBuffer(_WINDOW_BYTES).view
        self._start = 0
        self._num_bytes = 0
        self._summer = Checksummer()

    def header(self, offset: int) -> Header | None:
        """Return the header of the record in this place; None: there is none. `OtherVersionError`."""
        page = self._bytes(offset, HEADER_BYTES)
        try:
            header = decode_header(page)
        except OtherVersionError:
            raise
        except StoreError:
            return None
        is_here = header.state == "committed" and header.place == place_of(self._segment.number, offset)
        return header if is_here and header.info.num_bytes >= 0 else None

    def is_whole(self, offset: int, info: RecordInfo) -> bool:
        """Whether the payload is complete and has the right checksum."""
        if offset + image_bytes(info.num_bytes) > self._segment.num_bytes:
            return False
        return self._summer.sum(self._payload(offset + HEADER_BYTES, info.num_bytes)) == info.checksum

    def _payload(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        for offset in range(start, start + num_bytes, _WINDOW_BYTES):
            yield self._bytes(offset, min(_WINDOW_BYTES, start + num_bytes - offset))

    def _bytes(self, offset: int, num_bytes: int) -> memoryview:
        """Return bytes from a page on, at most a window; fewer at the end of the file."""
        if not self._start <= offset <= offset + num_bytes <= self._start + self._num_bytes:
            self._start = offset
            self._num_bytes = os.preadv(self._fd, [self._buffer], offset)
        start = offset - self._start
        return self._buffer[start : min(start + num_bytes, self._num_bytes)]
