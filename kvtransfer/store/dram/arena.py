"""The memory of the host tier: one sealed memfd that the owner divides and every rank of the node maps.

The first granule holds the superblock. A record takes whole consecutive granules, its header page first. A
header is valid only at the place for which it was written (`RecordPlace`), so that payload bytes and copies
are never mistaken for records.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Iterator

from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.host_memory import SCRATCH_BYTES, map_shared, mapping_bytes, populate_write
from kvtransfer.common.os_errors import os_reason
from kvtransfer.errors import StoreError
from kvtransfer.store.dram.arena_space import ArenaSpace
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.record import (
    HEADER_BYTES,
    MAGIC,
    Header,
    RecordPlace,
    State,
    Writer,
    decode_header,
    encode_header,
    image_bytes,
)

ID_BYTES = 16
HUGE_PAGE_BYTES = 2 << 20
MIN_GRANULE_BYTES = 4 << 10
MAX_GRANULE_BYTES = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_MAGIC = b"tandem\x9dA"
_VERSION = 1
# Magic, version, granule bytes, number of bytes, id; then the checksum of these.
_SUPERBLOCK = struct.Struct("<8sIIQ16s")
_SUM = struct.Struct("<Q")

_log = logging.getLogger(__name__)


def arena_bytes(num_bytes: int) -> int:
    """Return the size of an arena of at least `num_bytes`: a multiple of 2 MiB."""
    return max(-(-num_bytes // HUGE_PAGE_BYTES), 1) * HUGE_PAGE_BYTES


class Arena(ArenaSpace):
    """`num_bytes` of shared memory, divided into granules. `view` is all of it; `fd` is sent to ranks.

    Made by `create` or `adopt`, and used by one thread.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, arena_id: bytes, granule_bytes: int) -> None:
        num_bytes = len(mapping) - SCRATCH_BYTES  # in the tail other owners' agents measure their path
        super().__init__(arena_id, num_bytes, granule_bytes)
        self.fd = fd
        self.view = memoryview(mapping)[:num_bytes]
        self._mapping: mmap.mmap | None = mapping
        self.is_adopted = False
        self._found: list[tuple[int, Header]] = []

    @classmethod
    def create(cls, num_bytes: int, granule_bytes: int, huge_pages: bool) -> Arena:
        """Create an empty arena of `num_bytes` rounded up to 2 MiB, in reserved huge pages when they are
        requested and there are enough. Its memory is populated by the first writes or by `Prefault`.
        `OSError`: the host refuses."""
        _check_granule(granule_bytes)
        num_bytes = arena_bytes(num_bytes)
        fd, mapping = _map_new(mapping_bytes(num_bytes), huge_pages)
        arena = cls(fd, mapping, secrets.token_bytes(ID_BYTES), granule_bytes)
        arena.view[: _SUPERBLOCK.size + _SUM.size] = _superblock(arena.id, granule_bytes, num_bytes)
        arena.give_all()
        return arena

    @classmethod
    def adopt(cls, fd: int, granule_bytes: int) -> Arena:
        """Adopt the arena of an earlier owner by its descriptor, which the arena takes over; `scan` returns
        its records. `StoreError`, with `fd` closed, when it is no arena, not sealed, damaged, or of another
        granule or version."""
        try:
            return cls._adopt(fd, granule_bytes)
        except OSError as error:
            os.close(fd)
            raise StoreError(f"the arena cannot be mapped: {os_reason(error)}") from error
        except StoreError:
            os.close(fd)
            raise

    @classmethod
    def _adopt(cls, fd: int, granule_bytes: int) -> Arena:
        _check_granule(granule_bytes)
        num_bytes = os.fstat(fd).st_size - SCRATCH_BYTES
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise StoreError("the arena is not sealed: whoever shrinks it could end this process")
        front = os.pread(fd, _SUPERBLOCK.size + _SUM.size, 0)
        arena_id = front[_SUPERBLOCK.size - ID_BYTES : _SUPERBLOCK.size]
        if num_bytes <= 0 or front != _superblock(arena_id, granule_bytes, num_bytes):
            raise StoreError(f"no arena of {num_bytes} bytes in granules of {granule_bytes}")
        arena = cls(fd, map_shared(fd, mapping_bytes(num_bytes)), arena_id, granule_bytes)
        arena.is_adopted = True
        arena._search()
        return arena

    # ------------------------------------------------------------------------------------------ space

    def map_pages(self, start: int, num_bytes: int) -> None:
        """Map populated memory into this process, to avoid a fault for each page."""
        if self._mapping is not None:
            populate_write(self._mapping, start, num_bytes)

    # ----------------------------------------------------------------------------------------- records

    def write_header(
        self, offset: int, info: RecordInfo, state: State, sequence: int, writer: Writer | None = None
    ) -> None:
        # A header torn by a crash has a wrong checksum, and no scan finds it.
        page = encode_header(info, state, sequence, writer, RecordPlace(self.id, offset))
        self.view[offset : offset + HEADER_BYTES] = page

    def info_at(self, offset: int) -> RecordInfo | None:
        try:
            return decode_header(self.view[offset : offset + HEADER_BYTES]).info
        except StoreError:
            return None

    def space(self, offset: int) -> memoryview:
        return self.view[offset : offset + self._counts[offset] * self.granule_bytes]

    def payload(self, offset: int, num_bytes: int) -> memoryview:
        return self.view[offset + HEADER_BYTES : offset + HEADER_BYTES + num_bytes]

    def image(self, offset: int, num_payload: int) -> memoryview:
        return self.view[offset : offset + image_bytes(num_payload)]

    def scan(self) -> Iterator[tuple[int, Header]]:
        return iter(self._found)

    def close(self) -> None:
        """Close the arena; the memory is unmapped when the last view of it is dropped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._found = []
        self.view = memoryview(bytearray())
        self._mapping = None

    # ------------------------------------------------------------------------------------------ inside

    def _erase(self, offset: int) -> None:
        self.view[offset : offset + len(MAGIC)] = bytes(len(MAGIC))

    def _search(self) -> None:
        """Find the records of an adopted arena; the ranges between them are free."""
        granule, total = self.granule_bytes, self._extents.num_total
        position = free_from = 1
        for first, last in _written_ranges(self.fd, self.num_bytes):
            position = max(position, first // granule)
            while position * granule < last:
                header = self._header_at(position * granule)
                if header is None:
                    position += 1
                    continue
                if position > free_from:
                    self._extents.give(free_from, position - free_from)
                count = self._num_granules(header.info.num_bytes)
                self._counts[position * granule] = count
                self._found.append((position * granule, header))
                position = free_from = position + count
                self.num_used_bytes = position * granule
        if total > free_from:
            self._extents.give(free_from, total - free_from)

    def _header_at(self, offset: int) -> Header | None:
        if self.view[offset : offset + len(MAGIC)] != MAGIC:
            return None
        try:
            header = decode_header(self.view[offset : offset + HEADER_BYTES])
        except StoreError:
            return None
        is_here = header.place == RecordPlace(self.id, offset)
        num_payload = header.info.num_bytes
        fits = num_payload >= 0 and offset + self.record_bytes(num_payload) <= self.num_bytes
        return header if is_here and fits else None


def fill_with_zeros(memory: memoryview) -> None:
    """Fill it, without holding up other threads."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 0, len(memory))


def _check_granule(granule_bytes: int) -> None:
    is_power = granule_bytes & (granule_bytes - 1) == 0
    if not is_power or not MIN_GRANULE_BYTES <= granule_bytes <= MAX_GRANULE_BYTES:
        raise StoreError(f"granules of {granule_bytes} bytes: only powers of two from 4 KiB to 1 MiB")


def _superblock(arena_id: bytes, granule_bytes: int, num_bytes: int) -> bytes:
    fields = _SUPERBLOCK.pack(_MAGIC, _VERSION, granule_bytes, num_bytes, arena_id)
    return fields + _SUM.pack(checksum(fields))


def _map_new(num_bytes: int, huge_pages: bool) -> tuple[int, mmap.mmap]:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_pages:
        try:
            return _map_sealed(num_bytes, flags | os.MFD_HUGETLB)
        except OSError as error:
            _log.info("no reserved huge pages for %d bytes of the store: %s", num_bytes, error)
    return _map_sealed(num_bytes, flags)


def _map_sealed(num_bytes: int, flags: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("tandem-store", flags)
    try:
        os.ftruncate(fd, num_bytes)
        # A rank that shrank the file would turn the owner's own accesses into SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return fd, map_shared(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise


def _written_ranges(fd: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges where the file has pages: reading a hole through the mapping would populate it."""
    position = 0
    while position < num_bytes:
        try:
            first = os.lseek(fd, position, os.SEEK_DATA)
            position = os.lseek(fd, first, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing more is written
                return
            first, position = position, num_bytes  # a file of huge pages has no holes to report
        yield first, min(position, num_bytes)
