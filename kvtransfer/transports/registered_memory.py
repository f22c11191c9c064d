"""Describe the memory that a NIXL agent may register: a rank's pool, buffers, and runs of blocks as spans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.blocks.device_pool import DevicePool, StagingArea
from kvtransfer.blocks.layout import Run
from kvtransfer.blocks.pool import HostPool, KvPool
from kvtransfer.errors import PathError
from kvtransfer.transports.nixl import Region, Spans


class Runs:
    """Runs of one block, from a region of blocks of `src_bytes` to one of blocks of `dst_bytes`."""

    def __init__(self, runs: Sequence[Run], src_bytes: int, dst_bytes: int) -> None:
        columns = np.array(runs, dtype=np.uint64).reshape(-1, 3)
        self._src, self._dst, self._lengths = columns[:, 0], columns[:, 1], columns[:, 2]
        self._src_bytes, self._dst_bytes = src_bytes, dst_bytes

    def spans(
        self, source: Region, src_blocks: Sequence[int], target: Region, dst_blocks: Sequence[int]
    ) -> tuple[Spans, Spans]:
        """Return the source and the target span of each run of every pair of blocks."""
        lengths = np.tile(self._lengths, len(src_blocks))
        starts = (_starts(src_blocks, self._src_bytes) + self._src).ravel()
        ends = (_starts(dst_blocks, self._dst_bytes) + self._dst).ravel()
        return source.spans(starts, lengths), target.spans(ends, lengths)


class RegisteredBuffer(StagingArea):
    """A staging area that an agent may register: its `region`."""

    def __init__(self, pool: KvPool, num_bytes: int) -> None:
        super().__init__(pool, num_bytes)
        self.region = Region(self.data.data_ptr(), num_bytes, *_kind(self.data))


def pool_region(pool: KvPool) -> Region:
    """Return where the pool's blocks lie; `PathError` for memory that cannot be registered."""
    if isinstance(pool, HostPool):
        address = int(np.frombuffer(pool.memory.buffer, dtype=np.uint8).ctypes.data)
        return Region(address, len(pool.memory.buffer), "DRAM", 0)
    if isinstance(pool, DevicePool):
        return Region(pool.tensor.data_ptr(), pool.tensor.numel(), *_kind(pool.tensor))
    raise PathError(f"the pool on {pool.device} cannot be registered")


def _kind(memory: torch.Tensor) -> tuple[str, int]:
    device = memory.device
    return ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)


def _starts(blocks: Sequence[int], block_bytes: int) -> npt.NDArray[np.uint64]:
    return np.array(blocks, dtype=np.uint64)[:, None] * np.uint64(block_bytes)
