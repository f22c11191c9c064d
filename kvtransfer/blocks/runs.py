"""Copies and sums the runs of many blocks in one call: compiled code where there is a compiler, else numpy.

The two give the same bytes and the same sums (`kvtransfer.blocks.checksum`), which run over a piece's runs in the
order of the table. Both give up the GIL while they work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer import native
from kvtransfer.blocks.checksum import Checksummer
from kvtransfer.blocks.layout import Run

Bytes = npt.NDArray[np.uint8]


class RunTable:
    """The runs of one piece of a block, from a source block to a target block; `num_bytes` in all."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self.num_bytes = sum(run.num_bytes for run in runs)
        self.src_end = max((run.src_offset + run.num_bytes for run in runs), default=0)
        self.dst_end = max((run.dst_offset + run.num_bytes for run in runs), default=0)
        # int64 [runs, (src_offset, dst_offset, num_bytes)]
        self.array = np.array(self.runs, dtype=np.int64).reshape(-1, 3)

    def reversed(self) -> RunTable:
        """From the target block to the source block."""
        return RunTable([Run(run.dst_offset, run.src_offset, run.num_bytes) for run in self.runs])


class Place:
    """Contiguous bytes that runs are copied from or to; keeps their memory alive."""

    def __init__(self, memory: memoryview) -> None:
        self.bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.address = self.bytes.ctypes.data


def copy_runs(
    src: Place,
    src_offsets: Sequence[int],
    dst: Place,
    dst_offsets: Sequence[int],
    table: RunTable,
    *,
    sums: bool = True,
    streamed: bool = False,
) -> list[int]:
    """Copy the table's runs of the block at each source offset to the block at the target offset; returns
    each piece's sum (none without `sums`). `streamed`: the target is not read here soon, so that its bytes
    need no place in the cache. `IndexError` when a run would leave `src` or `dst`."""
    if len(src_offsets) != len(dst_offsets):
        raise ValueError(f"{len(src_offsets)} blocks to {len(dst_offsets)} places")
    _check(src, src_offsets, table.src_end)
    _check(dst, dst_offsets, table.dst_end)
    if dst.bytes.flags.writeable is False:
        raise ValueError("the target is read-only")
    kernel = native.load()
    if kernel is not None:
        return _move(kernel, src, src_offsets, dst, dst_offsets, table, sums=sums, streamed=streamed)
    for start, end in zip(src_offsets, dst_offsets, strict=True):
        for run in table.runs:
            source = src.bytes[start + run.src_offset : start + run.src_offset + run.num_bytes]
            np.copyto(dst.bytes[end + run.dst_offset : end + run.dst_offset + run.num_bytes], source)
    return _sums(src, src_offsets, table) if sums else []


def sum_runs(src: Place, src_offsets: Sequence[int], table: RunTable) -> list[int]:
    """The sum of each block's piece where it lies. `IndexError` when a run would leave `src`."""
    _check(src, src_offsets, table.src_end)
    kernel = native.load()
    if kernel is not None:
        return _move(kernel, src, src_offsets, None, (), table, sums=True, streamed=False)
    return _sums(src, src_offsets, table)


def _sums(src: Place, src_offsets: Sequence[int], table: RunTable) -> list[int]:
    checksummer = Checksummer()
    return [
        checksummer.sum(
            src.bytes[start + run.src_offset : start + run.src_offset + run.num_bytes].data
            for run in table.runs
        )
        for start in src_offsets
    ]


def _move(
    kernel: native.RunKernel,
    src: Place,
    src_offsets: Sequence[int],
    dst: Place | None,
    dst_offsets: Sequence[int],
    table: RunTable,
    *,
    sums: bool,
    streamed: bool,
) -> list[int]:
    starts = np.array(src_offsets, dtype=np.int64)
    ends = np.array(dst_offsets, dtype=np.int64)
    totals = np.empty(len(starts) if sums else 0, dtype=np.uint64)
    kernel.move_runs(
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


def _check(place: Place, offsets: Sequence[int], end: int) -> None:
    if offsets and (min(offsets) < 0 or max(offsets) + end > len(place.bytes)):
        raise IndexError(f"runs up to byte {max(offsets) + end} of {len(place.bytes)}")
