"""Copy and sum the runs of many blocks in one call: compiled code where there is a compiler, else numpy.

Both give the same bytes and the same sums (`kvtransfer.blocks.checksum`). A sum covers a piece's runs in the
order of the table. Both release the GIL while they work.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtransfer.blocks.checksum import Checksummer
from kvtransfer.blocks.layout import Run
from kvtransfer.common.compiler import bound_library

_SOURCE = Path(__file__).with_name("runs.cpp")
_FLAGS = ("-O3", "-std=c++17", "-fno-exceptions", "-Wno-psabi")
_THIS_CPU = "-march=native"

Bytes = npt.NDArray[np.uint8]


class RunTable:
    """The runs of one piece of a block, from a source block to a target block, and their `num_bytes` in
    all."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self.num_bytes = sum(run.num_bytes for run in runs)
        self.src_end = max((run.src_offset + run.num_bytes for run in runs), default=0)
        self.dst_end = max((run.dst_offset + run.num_bytes for run in runs), default=0)
        # int64 [num_runs, (src_offset, dst_offset, num_bytes)]
        self.array = np.array(self.runs, dtype=np.int64).reshape(-1, 3)

    def reversed(self) -> RunTable:
        """Return the table from the target block to the source block."""
        return RunTable([Run(run.dst_offset, run.src_offset, run.num_bytes) for run in self.runs])


class ByteRegion:
    """Contiguous bytes that runs are copied from or to. Keeps their memory alive."""

    def __init__(self, memory: memoryview) -> None:
        self.bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.address = self.bytes.ctypes.data

    def check(self, offsets: Sequence[int], end: int) -> None:
        """Raise `IndexError` when `end` bytes from one of the offsets on leave the region."""
        if offsets and (min(offsets) < 0 or max(offsets) + end > len(self.bytes)):
            raise IndexError(f"runs up to byte {max(offsets) + end} of {len(self.bytes)}")


def copy_runs(
    src: ByteRegion,
    src_offsets: Sequence[int],
    dst: ByteRegion,
    dst_offsets: Sequence[int],
    table: RunTable,
    *,
    sums: bool = True,
    streamed: bool = False,
) -> list[int]:
    """Copy the table's runs of the block at each source offset to the block at the matching target offset.

    Returns the sum of each block's piece, or an empty list without `sums`. With `streamed` the stores bypass
    the cache, for a target that is not read here soon. Raises `IndexError` when a run leaves `src` or `dst`.
    """
    if len(src_offsets) != len(dst_offsets):
        raise ValueError(f"{len(src_offsets)} blocks to {len(dst_offsets)} places")
    src.check(src_offsets, table.src_end)
    dst.check(dst_offsets, table.dst_end)
    if dst.bytes.flags.writeable is False:
        raise ValueError("the target is read-only")
    kernel = load_kernel()
    if kernel is not None:
        return kernel.move_runs(src, src_offsets, dst, dst_offsets, table, sums=sums, streamed=streamed)
    for start, end in zip(src_offsets, dst_offsets, strict=True):
        for run in table.runs:
            source = src.bytes[start + run.src_offset : start + run.src_offset + run.num_bytes]
            np.copyto(dst.bytes[end + run.dst_offset : end + run.dst_offset + run.num_bytes], source)
    return _sums(src, src_offsets, table) if sums else []


def sum_runs(src: ByteRegion, src_offsets: Sequence[int], table: RunTable) -> list[int]:
    """Sum each block's piece in place. Raises `IndexError` when a run leaves `src`."""
    src.check(src_offsets, table.src_end)
    kernel = load_kernel()
    if kernel is not None:
        return kernel.move_runs(src, src_offsets, None, (), table, sums=True, streamed=False)
    return _sums(src, src_offsets, table)


class RunKernel:
    """The compiled form of `copy_runs` and `sum_runs`: `move_runs` of runs.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._move_runs = library.move_runs
        self._move_runs.restype = None
        address, count = ctypes.c_void_p, ctypes.c_int64
        self._move_runs.argtypes = [
            *(address, address, address, address, count, address, count, ctypes.c_int32, address)
        ]

    def move_runs(
        self,
        src: ByteRegion,
        src_offsets: Sequence[int],
        dst: ByteRegion | None,
        dst_offsets: Sequence[int],
        table: RunTable,
        *,
        sums: bool,
        streamed: bool,
    ) -> list[int]:
        """Copy (without `dst`: only sum) checked runs. Releases the GIL."""
        starts = np.array(src_offsets, dtype=np.int64)
        ends = np.array(dst_offsets, dtype=np.int64)
        totals = np.empty(len(starts) if sums else 0, dtype=np.uint64)
        self._move_runs(
            src.address,
            starts.ctypes.data,
            dst.address if dst is not None else None,
            ends.ctypes.data,
            len(starts),
            table.array.ctypes.data,
            len(table.runs),
            streamed,
            totals.ctypes.data if sums else None,
        )
        return [int(total) for total in totals.tolist()]


@functools.cache
def load_kernel(cpu: str = _THIS_CPU) -> RunKernel | None:
    """Return the kernel compiled for `cpu` (a compiler flag), or None where numpy has to do its work."""
    return bound_library(
        _SOURCE, (*_FLAGS, cpu), lambda path: RunKernel(ctypes.CDLL(str(path))), "numpy is used"
    )


def _sums(src: ByteRegion, src_offsets: Sequence[int], table: RunTable) -> list[int]:
    checksummer = Checksummer()
    return [
        checksummer.sum(
            src.bytes[start + run.src_offset : start + run.src_offset + run.num_bytes].data
            for run in table.runs
        )
        for start in src_offsets
    ]
