"""The states that a load brings: those behind its last block, without which layers with a recurrent state
cannot continue there."""

from __future__ import annotations

from collections.abc import Sequence

from workers.scheduler.group_pool import GroupPool


class StateLoad:
    """The state behind the last of `num_blocks` blocks, which has this key, in each group of layers with
    states. What the device has of it is kept there until `release`."""

    def __init__(self, pools: Sequence[GroupPool], key: bytes, num_blocks: int) -> None:
        self._pools = pools
        self._key = key
        self._num_blocks = num_blocks
        found = [pool.find(key) for pool in pools]
        held = [block_id for block_id in found if block_id is not None]
        # Whether the device has it already, in every group: then it is not loaded.
        self.is_here = len(held) == len(found)
        self.block_ids: tuple[int, ...] = tuple(held) if self.is_here else ()

    def fits(self, num_spare: int) -> bool:
        """Whether there are free blocks for it, and `num_spare` more."""
        if self.is_here:
            return True
        return all(pool.num_free > num_spare for pool in self._pools)

    def take(self) -> None:
        """Hold the blocks that have it, or take those that it is loaded into."""
        if self.is_here:
            for pool, block_id in zip(self._pools, self.block_ids, strict=True):
                pool.acquire([block_id])
        else:
            self.block_ids = tuple(pool.allocate(1)[0] for pool in self._pools)

    def register(self, group: str) -> None:
        """Make findable what was loaded."""
        if not self.is_here:
            for pool, block_id in zip(self._pools, self.block_ids, strict=True):
                pool.register(block_id, self._key, group, self._num_blocks)

    def release(self) -> None:
        """Release all blocks."""
        for pool, block_id in zip(self._pools, self.block_ids, strict=True):
            pool.release([block_id])
        self.block_ids = ()
