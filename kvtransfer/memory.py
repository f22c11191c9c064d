"""The KV pool's memory in host RAM: one mapping that other processes of the host may share.

On Linux it is a memfd: it has no name, nothing lies in /dev/shm, and another process gets it only by
receiving the descriptor over an authenticated socket. Elsewhere it is private, and "shm" is not offered.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys

ALIGNMENT_BYTES = 2 << 20
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Of Linux's madvise; the mmap module has no names for them."""
SCRATCH_BYTES = 4 << 20
"""Behind the pool in the same mapping: where peers write when they measure their path."""


class KvMemory:
    """`buffer` (writable, zero at first, exactly the pool) and `fd` (-1 where memory cannot be shared).

    The mapping is the pool rounded up to 2 MiB, then the scratch area. Its pages are taken when first
    written, or all by `populate`.
    """

    def __init__(self, mapping: mmap.mmap, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._mapping: mmap.mmap | None = mapping
        self.whole = memoryview(mapping)
        """The pool, the padding and the scratch area."""
        self.buffer = self.whole[:num_bytes]

    @classmethod
    def allocate(cls, num_bytes: int) -> KvMemory:
        """Memory for a pool of `num_bytes`; `OSError` when the host refuses."""
        total_bytes = mapping_bytes(num_bytes)
        if sys.platform != "linux":
            return cls(mmap.mmap(-1, total_bytes), -1, num_bytes)
        fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, total_bytes)
        # A peer that shrank the file would turn our own accesses into SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return cls(map_shared(fd, total_bytes), fd, num_bytes)

    def populate(self) -> None:
        """Take all pages of the pool now: a first write to a page costs many times its copy."""
        assert self._mapping is not None
        populate_write(self._mapping, 0, self.num_bytes)

    def close(self) -> None:
        """Let the memory go. It is unmapped when the last view or tensor over it is dropped: a tensor holds
        the buffer without pinning it, so that unmapping here would pull the pages from under it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.buffer = self.whole = memoryview(bytearray())
        self._mapping = None


def mapping_bytes(num_bytes: int) -> int:
    """Size of the whole mapping of a pool of `num_bytes`."""
    return scratch_offset(num_bytes) + SCRATCH_BYTES


def scratch_offset(num_bytes: int) -> int:
    """Where the scratch area starts in the mapping of a pool of `num_bytes`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def map_shared(fd: int, total_bytes: int) -> mmap.mmap:
    """Map a pool's descriptor, with huge pages where the kernel gives them."""
    mapping = mmap.mmap(fd, total_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def populate_write(mapping: mmap.mmap, offset: int, num_bytes: int) -> None:
    """Take the pages of this range now; what they hold stays."""
    _populate(mapping, _POPULATE_WRITE, offset, num_bytes)


def populate_read(mapping: mmap.mmap, offset: int, num_bytes: int) -> None:
    """Map what the pages of this range hold already, all at once instead of at the first read of each."""
    _populate(mapping, _POPULATE_READ, offset, num_bytes)


def _populate(mapping: mmap.mmap, advice: int, offset: int, num_bytes: int) -> None:
    """Where the kernel can (Linux 5.14); else pages come one by one as they are touched."""
    start = offset - offset % mmap.PAGESIZE
    if sys.platform == "linux" and num_bytes:
        with contextlib.suppress(OSError):
            mapping.madvise(advice, start, offset + num_bytes - start)
