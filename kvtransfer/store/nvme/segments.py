"""Segment files of the NVMe tier: record images one after the other, and behind them a directory when full.

| image | image | ... | unused | directory, padded to a page | trailer page |

A header is valid only in the segment and at the offset for which it was written (`record.RecordPlace`), a
trailer only in its segment: so a file can be reused under a new number without being cleared.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtransfer.blocks.checksum import checksum
from kvtransfer.codec import Codec, Part
from kvtransfer.errors import OtherVersionError, StoreIoError
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.record import PAGE_BYTES, Header, RecordPlace, encode_header, image_bytes
from kvtransfer.store.record import VERSION as RECORD_VERSION

VERSION = 2
SUFFIX = ".seg"
# Files that stay open though nobody reads or writes them.
MAX_IDLE_FILES = 256

_MAGIC = b"tandem\x9dS"
# Magic, CRC-32 of the rest of the page, version, segment number, end of the images, length and checksum of
# the directory. The first three stand there in every version.
_TRAILER = struct.Struct("<8sIIQQQQ")
_CRC = struct.Struct("<I")
_SUMMED_FROM = 12
# Read at once when a segment is opened: with the usual sizes that is all of its directory.
_TAIL_BYTES = 256 << 10
# The unit of `st_blocks`.
_BLOCK_BYTES = 512
# The most bytes that an entry of the directory takes in addition to its `RecordInfo`.
_ENTRY_BYTES = 16

_HEADERS: Codec[Header] = Codec(Header)
_HEADER_FRONT = struct.Struct("<II")
# Version and length of the fields, then the fields: see `record`.
_HEADER_SUMMED_FROM = 16
_encoder = msgspec.msgpack.Encoder()


class Directory(Part, frozen=True):
    """The contents of a segment: records by offset, and the offsets of dropped records whose headers a scan
    of every page would still find."""

    live: list[tuple[int, RecordInfo]]
    stale: list[int]


_decoder = msgspec.msgpack.Decoder(Directory)


class NvmeRef(NamedTuple):
    """The place of a record's image; valid until the tier reports that the record was moved or dropped."""

    segment: int
    offset: int
    num_bytes: int


@dataclass(eq=False)
class Segment:
    """One file and its state. `SegmentFiles` maintains `fd`, `num_users` and `is_gone`, `SegmentTable` the
    rest."""

    number: int
    path: Path
    num_bytes: int
    # The offset of the next image.
    end: int = 0
    live: dict[int, RecordInfo] = field(default_factory=dict)
    # The bytes of the live records' images.
    num_live_bytes: int = 0
    # Offsets of records that are not wanted any more and whose headers still stand on the disk.
    stale: set[int] = field(default_factory=set)
    # The most bytes that the directory of all records takes.
    directory_bytes: int = _ENTRY_BYTES
    num_writing: int = 0
    is_full: bool = False
    # A directory stands behind its records.
    is_sealed: bool = False
    # Whether something was written to it that is not yet durable.
    is_dirty: bool = False
    # Bytes of records that are not held may stand between those that are, or behind them.
    has_remains: bool = False
    # It could not be read when the tier was opened: its contents are unknown.
    is_unread: bool = False
    directory_lock: threading.Lock = field(default_factory=threading.Lock)
    fd: int = -1
    open_lock: threading.Lock = field(default_factory=threading.Lock)
    num_users: int = 0
    is_gone: bool = False

    def take(self, num_bytes: int, info: RecordInfo) -> int | None:
        """Reserve space for an image of `info`; None when it does not fit before the directory."""
        entry_bytes = len(_encoder.encode(info)) + _ENTRY_BYTES
        if self.end + num_bytes + _padded(self.directory_bytes + entry_bytes) + PAGE_BYTES > self.num_bytes:
            return None
        self.directory_bytes += entry_bytes
        offset, self.end = self.end, self.end + num_bytes
        return offset

    def adopt(self, found: Directory) -> None:
        """Take in the contents found in the file."""
        self.live = dict(found.live)
        self.num_live_bytes = sum(image_bytes(info.num_bytes) for info in self.live.values())
        self.stale = set(found.stale)
        self.has_remains = True  # nobody knows
        self.directory_bytes = len(_encoder.encode(found)) + _ENTRY_BYTES * (len(found.live) + 1)

    @property
    def takes_directory(self) -> bool:
        """Whether the directory fits behind the records; never in a file that was cut."""
        tail_bytes = _padded(self.directory_bytes) + PAGE_BYTES
        return self.num_bytes % PAGE_BYTES == 0 and self.end + tail_bytes <= self.num_bytes

    def add(self, offset: int, info: RecordInfo) -> None:
        """Count the record that stands at this offset."""
        self.live[offset] = info
        self.num_live_bytes += image_bytes(info.num_bytes)

    def remove(self, offset: int) -> RecordInfo | None:
        """Count the record at this offset no more; None: none is counted there."""
        info = self.live.pop(offset, None)
        if info is not None:
            self.num_live_bytes -= image_bytes(info.num_bytes)
            self.has_remains = True
        return info

    @property
    def num_dead_bytes(self) -> int:
        """Bytes of images that are not wanted any more."""
        return self.end - self.num_live_bytes

    @property
    def num_unused_bytes(self) -> int:
        """About how many more bytes fit."""
        return max(0, self.num_bytes - PAGE_BYTES - _padded(self.directory_bytes) - self.end)


def segment_name(number: int) -> str:
    return f"{number:010d}{SUFFIX}"


def segment_number(path: Path) -> int | None:
    """Return the number in the name of a segment file; None: the file is none."""
    number = int(path.stem) if path.stem.isascii() and path.stem.isdigit() and len(path.stem) == 10 else None
    return number if path.suffix == SUFFIX else None


def header_page(info: RecordInfo, number: int, offset: int) -> bytes:
    """Return the header page of the record at this place."""
    return encode_header(info, "committed", 0, None, place_of(number, offset))


def is_header_of(page: memoryview, info: RecordInfo, number: int, offset: int) -> bool:
    """Whether the page holds that header. Its checksum is ignored, as all that it covers is compared."""
    fields = _HEADERS.encode(Header(info, "committed", 0, None, place_of(number, offset)))
    expected = _HEADER_FRONT.pack(RECORD_VERSION, len(fields)) + fields
    return page[_HEADER_SUMMED_FROM : _HEADER_SUMMED_FROM + len(expected)] == expected


def place_of(number: int, offset: int) -> RecordPlace:
    """Return the place that a header at this offset of that segment names."""
    return RecordPlace(number.to_bytes(8, "big"), offset)


def io_error(doing: str, path: Path, error: OSError) -> StoreIoError:
    name = errno.errorcode.get(error.errno or 0, "OSError")
    return StoreIoError(f"{doing} {path}: {name}, {error.strerror or error}")


@contextmanager
def naming(doing: str, path: Path) -> Iterator[None]:
    """Turn every `OSError` inside into a `StoreIoError` whose text names the failed step, the place and the
    cause."""
    try:
        yield
    except OSError as error:
        raise io_error(doing, path, error) from error


class PageBuffer:
    """Page-aligned memory, as O_DIRECT requires."""

    def __init__(self, num_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, _padded(num_bytes)))


class SegmentFiles:
    """The files of one folder: creates, renames and removes them, opens them for use, and closes some of the
    idle ones. Thread-safe."""

    def __init__(self, folder: Path, flags: int) -> None:
        self.folder = folder
        # Beside O_RDWR: `os.O_DIRECT` where the file system takes it.
        self.flags = flags
        self._lock = threading.Lock()  # never held during a system call: an event loop waits for it
        self._idle: OrderedDict[int, Segment] = OrderedDict()

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


# ------------------------------------------------------------------------------------------- bytes


def write_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all buffers, one after the other; `OSError` when anything is missing."""
    num_bytes = sum(map(len, buffers))
    num_written = os.pwritev(fd, buffers, offset)
    if num_written != num_bytes:
        raise OSError(errno.EIO, f"{num_written} bytes instead of {num_bytes} at {offset}")


def read_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill all buffers, one after the other; `OSError` when the file ends before."""
    num_bytes = sum(map(len, buffers))
    num_read = os.preadv(fd, buffers, offset)
    if num_read != num_bytes:
        raise OSError(errno.EIO, f"{num_read} bytes instead of {num_bytes} at {offset}")


def write_directory(fd: int, segment: Segment, directory: Directory) -> int:
    """Write directory and trailer; return the number of bytes. `OSError`. After a crash of the machine the
    directory may name records that are not there: reading them fails, as if they were damaged."""
    encoded = _encoder.encode(directory)
    tail = PageBuffer(_padded(len(encoded)) + PAGE_BYTES).view
    tail[: len(encoded)] = encoded
    page = tail[-PAGE_BYTES:]
    _TRAILER.pack_into(
        page, 0, _MAGIC, 0, VERSION, segment.number, segment.end, len(encoded), checksum(encoded)
    )
    _CRC.pack_into(page, _SUMMED_FROM - _CRC.size, zlib.crc32(page[_SUMMED_FROM:]))
    write_at(fd, [tail], segment.num_bytes - len(tail))
    return len(tail)


def erase_page(fd: int, offset: int) -> None:
    """Erase the header at this offset. `OSError`."""
    write_at(fd, [PageBuffer(PAGE_BYTES).view], offset)


def clear_directory(fd: int, segment: Segment) -> None:
    """Erase the directory of a segment that will get more records. `OSError`."""
    erase_page(fd, segment.num_bytes - PAGE_BYTES)


def read_directory(fd: int, segment: Segment) -> Directory | None:
    """Return the directory of a sealed segment, and set the segment's `end`; None when there is no whole
    directory of this segment. `OtherVersionError` when it is of another version, `OSError`."""
    if segment.num_bytes % PAGE_BYTES or segment.num_bytes < 2 * PAGE_BYTES:
        return None
    tail = PageBuffer(min(segment.num_bytes, _TAIL_BYTES)).view
    read_at(fd, [tail], segment.num_bytes - len(tail))
    page = tail[-PAGE_BYTES:]
    magic, crc, version, number, end, num_encoded, total = _TRAILER.unpack_from(page)
    if magic != _MAGIC or crc != zlib.crc32(page[_SUMMED_FROM:]):
        return None
    if version != VERSION:
        raise OtherVersionError(f"{segment.path} has format version {version}; this is version {VERSION}")
    start = segment.num_bytes - PAGE_BYTES - _padded(num_encoded)
    if number != segment.number or not end <= start:
        return None
    if _padded(num_encoded) + PAGE_BYTES > len(tail):
        tail = PageBuffer(_padded(num_encoded) + PAGE_BYTES).view
        read_at(fd, [tail], start)
    encoded = tail[-PAGE_BYTES - _padded(num_encoded) :][:num_encoded]
    if checksum(encoded) != total:
        return None
    try:
        directory = _decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not all(_fits(offset, info, end) for offset, info in directory.live):
        return None
    if not all(_is_page(offset, end) for offset in directory.stale):
        return None
    segment.end = end
    return directory


def _fits(offset: int, info: RecordInfo, end: int) -> bool:
    """Whether the image of the record lies before the end of the images."""
    return _is_page(offset, end) and info.num_bytes >= 0 and offset + image_bytes(info.num_bytes) <= end


def _is_page(offset: int, end: int) -> bool:
    return 0 <= offset < end and offset % PAGE_BYTES == 0


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
