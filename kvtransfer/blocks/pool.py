"""A rank's KV pool for the transports: blocks of one layout, in host memory or on a device.

A *piece* of a block is its part in a shard; packed, its bytes lie in the order of that shard's own layout.
Sums are those of `kvtransfer.blocks.checksum`. Any thread may call any method, except `close`, which comes
last."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np

from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout, piece_runs, plan_runs
from kvtransfer.blocks.runs import ByteRegion, RunTable, copy_runs, load_kernel, sum_runs
from kvtransfer.messages import Shard


class RecordPool(ABC):
    """A pool of `num_blocks` blocks of `layout` on `device` ("cpu", "cuda:0"), as the store copies them to
    and from records. Methods raise `IndexError` for a block id outside the pool, and `ValueError` for a piece
    that its blocks do not hold."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: str) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device

    @abstractmethod
    def store(
        self,
        block_ids: Sequence[int],
        region: ByteRegion,
        offsets: Sequence[int],
        layers: tuple[int, ...] | None = None,
    ) -> list[int]:
        """Copy whole blocks to these offsets of `region`, host memory outside the pool, where blocks have
        these layers (None: all). Returns the sums of the copied bytes themselves; none where blocks of the
        pool have less layers, and the others' places are left as they are."""

    @abstractmethod
    def load(
        self,
        block_ids: Sequence[int],
        piece: Shard,
        region: ByteRegion,
        offsets: Sequence[int],
        shard: Shard,
        layers: tuple[int, ...] | None = None,
    ) -> list[int]:
        """Fill that piece of each block from the packed bytes of the larger (or equal) piece `shard`, of
        these layers (None: all), at the offset. Returns the sums of all of `shard`, which the pool itself
        need not hold; none where blocks of the pool have less layers."""

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


class KvPool(RecordPool):
    """A pool whose blocks the transports copy, too."""

    @abstractmethod
    def sums(self, block_ids: Sequence[int], piece: Shard) -> list[int]:
        """Compute the checksum of that piece of each block in place."""

    def sums_of(self, pieces: Sequence[tuple[Sequence[int], Shard]]) -> list[list[int]]:
        """Compute the checksums of several pieces, each of its own blocks, as `sums` does."""
        return [self.sums(block_ids, piece) for block_ids, piece in pieces]

    @abstractmethod
    def gather(self, block_ids: Sequence[int], piece: Shard, staging: memoryview) -> list[int]:
        """Pack the blocks' pieces one after another into `staging`. Returns their checksums."""

    @abstractmethod
    def scatter(self, block_ids: Sequence[int], piece: Shard, staging: memoryview) -> None:
        """Unpack pieces that lie one after another in `staging` into the blocks."""

    @abstractmethod
    def allocate_staging(self, num_bytes: int) -> memoryview:
        """Allocate writable host memory that `gather` and `scatter` access at full speed."""

    def computing(self) -> AbstractContextManager[None]:
        """Run torch's work on the pool's memory in the order of the pool's own copies. What the block has
        queued is done at its end."""
        return nullcontext()


class HostPool(KvPool):
    """A pool in host memory."""

    def __init__(self, layout: BlockLayout, memory: KvMemory) -> None:
        """Raises `ValueError` if the memory is not a whole number of blocks. There are none of a group of
        which the rank has no layer, whose blocks are empty."""
        num_blocks, rest = divmod(memory.num_bytes, max(1, layout.block_bytes))
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

    def store(
        self,
        block_ids: Sequence[int],
        region: ByteRegion,
        offsets: Sequence[int],
        layers: tuple[int, ...] | None = None,
    ) -> list[int]:
        table, is_whole = record_table(self.layout, layers), self.layout.group == layers
        targets = self.offsets(block_ids)
        return copy_runs(self.region, targets, region, offsets, table, sums=is_whole, streamed=True)

    def load(
        self,
        block_ids: Sequence[int],
        piece: Shard,
        region: ByteRegion,
        offsets: Sequence[int],
        shard: Shard,
        layers: tuple[int, ...] | None = None,
    ) -> list[int]:
        targets = self.offsets(block_ids)
        table = part_table(self.layout, piece, shard, layers)
        is_whole = self.layout.group == layers
        if piece == shard and is_whole:
            return copy_runs(region, offsets, self.region, targets, table, streamed=True)
        copy_runs(region, offsets, self.region, targets, table, sums=False, streamed=True)
        table = piece_table(replace(self.layout, shard=shard), shard)
        return sum_runs(region, offsets, table) if is_whole else []

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
def record_table(layout: BlockLayout, layers: tuple[int, ...] | None) -> RunTable:
    """Return the runs from a block to the packed bytes of its shard, of these layers (None: of all)."""
    return RunTable(plan_runs(layout, replace(layout, group=layers), layout.shard))


@functools.lru_cache(maxsize=256)
def part_table(layout: BlockLayout, piece: Shard, shard: Shard, layers: tuple[int, ...] | None) -> RunTable:
    """Return the runs from the packed bytes of `shard`, of these layers (None: of all), to the part `piece`
    of a block. Raises `ValueError` if one of the two does not hold it."""
    return RunTable(plan_runs(replace(layout, shard=shard, group=layers), layout, piece))
