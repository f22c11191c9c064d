"""Memory that a NIXL agent may register: a rank's pool and slots beside it; runs of blocks as spans of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.device import DevicePool
from kvtransfer.errors import PathError
from kvtransfer.layout import Run
from kvtransfer.messages import Shard
from kvtransfer.pool import HostPool, KvPool
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
        """Of every pair of blocks, each run: where it lies and where it goes."""
        lengths = np.tile(self._lengths, len(src_blocks))
        starts = (_starts(src_blocks, self._src_bytes) + self._src).ravel()
        ends = (_starts(dst_blocks, self._dst_bytes) + self._dst).ravel()
        return source.spans(starts, lengths), target.spans(ends, lengths)


class Slot:
    """`num_bytes` of memory on the pool's device."""

    def __init__(self, pool: KvPool, num_bytes: int) -> None:
        self._pool = pool
        if isinstance(pool, DevicePool):
            self._tensor = pool.tensor.new_empty(num_bytes)
            self.region = Region(self._tensor.data_ptr(), num_bytes, *_kind(pool))
        else:
            self._memory = pool.allocate_staging(num_bytes)
            self.region = Region(_address(self._memory), num_bytes, "DRAM", 0)

    def gather(self, block_ids: Sequence[int], piece: Shard) -> list[int]:
        """Pack the blocks' pieces one after another; returns their checksums."""
        if isinstance(self._pool, DevicePool):
            return self._pool.gather(block_ids, piece, self._tensor)
        return self._pool.gather(block_ids, piece, self._memory)

    def flip_first_bit(self) -> None:
        if isinstance(self._pool, DevicePool):
            self._tensor[0] ^= 1
        else:
            self._memory[0] ^= 1


def pool_region(pool: KvPool) -> Region:
    """Where the pool's blocks lie; `PathError` for memory that cannot be registered."""
    if isinstance(pool, HostPool):
        return Region(_address(pool.memory.buffer), len(pool.memory.buffer), "DRAM", 0)
    if isinstance(pool, DevicePool):
        return Region(pool.tensor.data_ptr(), pool.tensor.numel(), *_kind(pool))
    raise PathError(f"the pool on {pool.device} cannot be registered")


def _kind(pool: DevicePool) -> tuple[str, int]:
    device = pool.tensor.device
    return ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _starts(blocks: Sequence[int], block_bytes: int) -> npt.NDArray[np.uint64]:
    return np.array(blocks, dtype=np.uint64)[:, None] * np.uint64(block_bytes)
