"""A rank's KV pool for the transports: blocks of one layout, in host memory or on a device.

A *piece* of a block is its part in a shard; packed, its bytes lie in the order of that shard's own layout.
Sums are those of `kvtransfer.blocks.checksum`. Any thread may call any method, except `close`, which comes
last."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvtransfer.blocks.layout import BlockLayout, piece_runs, plan_runs
from kvtransfer.blocks.runs import ByteRegion, RunTable, copy_runs, load_kernel, sum_runs
from kvtransfer.messages import Shard

ALIGNMENT_BYTES = 2 << 20
# Arguments of Linux's madvise that the mmap module does not name.
_POPULATE_READ, _POPULATE_WRITE = 22, 23
# So much is populated at a time: meanwhile the process can neither map memory nor unmap any.
_POPULATE_BYTES = 8 << 20
# The least of priorities: populating a pool takes what cores have left.
_LEAST_PRIORITY = 19
# Size of the area after the pool, in the same mapping, to which peers write when they measure their path.
SCRATCH_BYTES = 4 << 20


class KvPool(ABC):
    """A pool of `num_blocks` blocks of `layout` on `device` ("cpu", "cuda:0"). Methods raise `IndexError` for
    a block id outside the pool, and `ValueError` for a piece that its blocks do not hold."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: str) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device

    @abstractmethod
    def sums(self, block_ids: Sequence[int], piece: Shard) -> list[int]:
        """Compute the checksum of that piece of each block in place."""

    @abstractmethod
    def gather(self, block_ids: Sequence[int], piece: Shard, staging: memoryview) -> list[int]:
        """Pack the blocks' pieces one after another into `staging`. Returns their checksums."""

    @abstractmethod
    def scatter(self, block_ids: Sequence[int], piece: Shard, staging: memoryview) -> None:
        """Unpack pieces that lie one after another in `staging` into the blocks."""

    @abstractmethod
    def allocate_staging(self, num_bytes: int) -> memoryview:
        """Allocate writable host memory that `gather` and `scatter` access at full speed."""

    @abstractmethod
    def store(self, block_ids: Sequence[int], region: ByteRegion, offsets: Sequence[int]) -> list[int]:
        """Copy whole blocks to these offsets of `region`, host memory outside the pool. Returns the sums of
        the copied bytes themselves."""

    @abstractmethod
    def load(
        self, block_ids: Sequence[int], piece: Shard, region: ByteRegion, offsets: Sequence[int], shard: Shard
    ) -> list[int]:
        """Fill that piece of each block from the packed bytes of the larger (or equal) piece `shard` at the
        offset. Returns the sums of all of `shard`, which the pool itself need not hold."""

    def attach(self, region: ByteRegion) -> None:
        """Make this memory fast to access, before its first `store` and `load`."""
        return

    def detach(self, region: ByteRegion) -> None:
        """Undo `attach`, after the last `store` and `load` and before the memory is unmapped."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release the pool's memory."""

    def piece_bytes(self, piece: Shard) -> int:
        """Return the size of that piece of one block."""
        return replace(self.layout, shard=piece).block_bytes

    def check_blocks(self, block_ids: Sequence[int]) -> None:
        """Raise `IndexError` if one of them is outside the pool."""
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise IndexError(f"blocks {list(block_ids)} are not all within the {self.num_blocks} of the pool")


class HostPool(KvPool):
    """A pool in host memory."""

    def __init__(self, layout: BlockLayout, memory: KvMemory) -> None:
        """Raises `ValueError` if the memory is not a whole number of blocks."""
        num_blocks, rest = divmod(memory.num_bytes, layout.block_bytes)
        if rest:
            raise ValueError(f"{memory.num_bytes} bytes of memory for blocks of {layout.block_bytes} bytes")
        super().__init__(layout, num_blocks, "cpu")
        load_kernel()  # built now rather than in the first push
        self.memory = memory
        # The pool's bytes, for `kvtransfer.blocks.runs`.
        self.region = ByteRegion(memory.buffer)

    def sums(self, block_ids: Sequence[int], piece: Shard) -> list[int]:
        return sum_runs(self.region, self.offsets(block_ids), self._table(piece))

    def gather(self, block_ids: Sequence[int], piece: Shard, staging: memoryview) -> list[int]:
        table = self._table(piece)
        packed = range(0, len(block_ids) * table.num_bytes, table.num_bytes)
        return copy_runs(self.region, self.offsets(block_ids), ByteRegion(staging), packed, table)

    def scatter(self, block_ids: Sequence[int], piece: Shard, staging: memoryview) -> None:
        table = self._table(piece).reversed()
        packed = range(0, len(block_ids) * table.num_bytes, table.num_bytes)
        copy_runs(ByteRegion(staging), packed, self.region, self.offsets(block_ids), table, sums=False)

    def allocate_staging(self, num_bytes: int) -> memoryview:
        return np.empty(num_bytes, dtype=np.uint8).data

    def store(self, block_ids: Sequence[int], region: ByteRegion, offsets: Sequence[int]) -> list[int]:
        table = self._table(self.layout.shard)
        return copy_runs(self.region, self.offsets(block_ids), region, offsets, table, streamed=True)

    def load(
        self, block_ids: Sequence[int], piece: Shard, region: ByteRegion, offsets: Sequence[int], shard: Shard
    ) -> list[int]:
        targets = self.offsets(block_ids)
        table = part_table(self.layout, piece, shard)
        if piece == shard:
            return copy_runs(region, offsets, self.region, targets, table, streamed=True)
        whole = replace(self.layout, shard=shard)
        copy_runs(region, offsets, self.region, targets, table, sums=False, streamed=True)
        return sum_runs(region, offsets, piece_table(whole, shard))

    def offsets(self, block_ids: Sequence[int]) -> list[int]:
        """Return the byte offsets of the blocks. Raises `IndexError` for a block outside the pool."""
        self.check_blocks(block_ids)
        return [block_id * self.layout.block_bytes for block_id in block_ids]

    def close(self) -> None:
        self.region = ByteRegion(memoryview(bytearray()))
        self.memory.close()

    def _table(self, piece: Shard) -> RunTable:
        return piece_table(self.layout, piece)


@functools.lru_cache(maxsize=256)
def piece_table(layout: BlockLayout, piece: Shard) -> RunTable:
    """Return the runs from a block to its packed piece. Raises `ValueError` if the block does not hold it."""
    return RunTable(piece_runs(layout, piece))


@functools.lru_cache(maxsize=256)
def part_table(layout: BlockLayout, piece: Shard, shard: Shard) -> RunTable:
    """Return the runs from the packed bytes of `shard` to the part `piece` of a block. Raises `ValueError` if
    one of the two does not hold it."""
    return RunTable(plan_runs(replace(layout, shard=shard), layout, piece))


# ------------------------------------------------------------------------------------------- host memory


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
        write to a page costs many times a copy to it. Nobody need wait for the thread; what is written before
        it comes is taken then."""
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
    """Like `populate_write` of all pages, but other threads run meanwhile, as they do not during
    `mmap.madvise`."""
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
