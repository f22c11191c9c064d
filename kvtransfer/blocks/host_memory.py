"""Map and populate the host memory of a pool: shared files, huge pages, pages taken ahead of their use."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
import threading

ALIGNMENT_BYTES = 2 << 20
# Arguments of Linux's madvise that the mmap module does not name.
_POPULATE_READ, _POPULATE_WRITE = 22, 23
# Bytes populated at a time: until they are, the process can neither map memory nor unmap any.
_POPULATE_BYTES = 8 << 20
# The least of priorities: populating a pool takes what cores have left.
_LEAST_PRIORITY = 19
# Size of the area after the pool, in the same mapping, to which peers write when they measure their path.
SCRATCH_BYTES = 4 << 20


class KvMemory:
    """The memory of a host pool: one mapping that other processes of the host may share.

    `buffer` is exactly the pool, writable and zero at first. `fd` is -1 where memory cannot be shared. On
    Linux it is a memfd: it has no name, nothing lies in /dev/shm, and another process gets it only by
    receiving the descriptor over an authenticated socket. On other systems the memory is private, and "shm"
    is not offered.

    The mapping is the pool rounded up to 2 MiB, then the scratch area. Its pages are taken when first
    written, or before by `populate`."""

    def __init__(self, mapping: mmap.mmap, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self._populating: threading.Thread | None = None
        self._closed = threading.Event()
        self.num_bytes = num_bytes
        self._mapping: mmap.mmap | None = mapping
        # The pool, the padding and the scratch area.
        self.whole = memoryview(mapping)
        self.buffer = self.whole[:num_bytes]

    @classmethod
    def allocate(cls, num_bytes: int) -> KvMemory:
        """Allocate memory for a pool of `num_bytes`. Raises `OSError` if the host refuses."""
        total_bytes = mapping_bytes(num_bytes)
        if sys.platform != "linux":
            return cls(mmap.mmap(-1, total_bytes), -1, num_bytes)
        fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, total_bytes)
        # A peer that shrank the file would turn our own accesses into SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return cls(map_shared(fd, total_bytes), fd, num_bytes)

    def populate(self, most_bytes: int | None = None) -> threading.Thread:
        """Take the pages of the pool, the first `most_bytes` or all, on a thread that is returned: the first
        write to a page costs many times a copy to it. There is no need to wait for the thread; pages that are
        written before it reaches them are taken then."""
        assert self._mapping is not None
        num_bytes = self.num_bytes if most_bytes is None else min(self.num_bytes, most_bytes)
        arguments = self._mapping, num_bytes, self._closed
        self._populating = threading.Thread(
            target=_populate_all, args=arguments, name="kv-memory", daemon=True
        )
        self._populating.start()
        return self._populating

    def close(self) -> None:
        """Release the memory. It is unmapped when the last view or tensor over it is dropped: a tensor holds
        the buffer without pinning it, so that unmapping here would remove its pages."""
        self._closed.set()
        if self._populating is not None:
            self._populating.join()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.buffer = self.whole = memoryview(bytearray())
        self._mapping = None


def mapping_bytes(num_bytes: int) -> int:
    """Return the size of the whole mapping of a pool of `num_bytes`."""
    return scratch_offset(num_bytes) + SCRATCH_BYTES


def scratch_offset(num_bytes: int) -> int:
    """Return the offset of the scratch area in the mapping of a pool of `num_bytes`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def map_shared(fd: int, total_bytes: int) -> mmap.mmap:
    """Map a pool's descriptor, with huge pages where the kernel gives them."""
    mapping = mmap.mmap(fd, total_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def populate_write(mapping: mmap.mmap, offset: int, num_bytes: int) -> None:
    """Take the pages of this range now, and keep their contents."""
    _populate(mapping, _POPULATE_WRITE, offset, num_bytes)


def populate_read(mapping: mmap.mmap, offset: int, num_bytes: int) -> None:
    """Map the pages of this range that exist already, all at once instead of at the first read of each."""
    _populate(mapping, _POPULATE_READ, offset, num_bytes)


def _populate_all(mapping: mmap.mmap, num_bytes: int, stop: threading.Event) -> None:
    """Populate all pages as `populate_write` does, but without keeping other threads from running, as
    `mmap.madvise` would."""
    if sys.platform != "linux":
        return
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)  # of this thread alone
    first = ctypes.c_char.from_buffer(mapping)  # keeps it mapped
    advise = ctypes.CDLL(None).madvise
    for offset in range(0, num_bytes, _POPULATE_BYTES):
        size = min(_POPULATE_BYTES, num_bytes - offset)
        address = ctypes.addressof(first) + offset
        if stop.is_set() or advise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE):
            return


def _populate(mapping: mmap.mmap, advice: int, offset: int, num_bytes: int) -> None:
    """Advise the kernel (Linux 5.14); otherwise pages are taken one by one as they are touched."""
    start = offset - offset % mmap.PAGESIZE
    if sys.platform == "linux" and num_bytes:
        with contextlib.suppress(OSError):
            mapping.madvise(advice, start, offset + num_bytes - start)
