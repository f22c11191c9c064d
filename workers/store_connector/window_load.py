"""What a load brings into a group of layers with a window: the blocks that are needed behind its last one."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.blocks.group_prefix import first_needed_block
from workers.scheduler.group_pool import GroupPool

# In place of a block that is not loaded into a group.
NOT_WANTED = -1


class WindowLoad:
    """The blocks of one group for a load that makes a prefix of `end` blocks whole, the first `num_held` of
    which the device has."""

    def __init__(
        self, pool: GroupPool, keys: Sequence[bytes], num_held: int, end: int, block_tokens: int
    ) -> None:
        self._pool = pool
        self._keys = keys
        first = min(first_needed_block(end * block_tokens, pool.window, block_tokens), end)
        held = pool.find_all(keys[first:num_held]) if first < num_held else []
        # Whether what it follows on is on the device; it may have been evicted since it was found.
        self.follows_on = held is not None
        self._held_ids = held or []
        self._first = max(first, num_held)
        self._block_ids: list[int] = []
        self._num_wanted = end - self._first

    @property
    def num_references(self) -> int:
        return len(self._held_ids) + len(self._block_ids)

    def fits(self, num_spare: int) -> bool:
        """Whether there are free blocks for it, and `num_spare` more."""
        num_idle = sum(not self._pool.is_referenced(block_id) for block_id in self._held_ids)
        return self._num_wanted + num_idle + num_spare <= self._pool.num_free

    def take(self) -> None:
        """Hold the blocks that it follows on, and take those that it fills."""
        self._pool.acquire(self._held_ids)
        self._block_ids = self._pool.allocate(self._num_wanted)

    def block(self, index: int) -> int:
        """Return the block to load the prefix's block `index` into, or `NOT_WANTED`."""
        place = index - self._first
        return self._block_ids[place] if 0 <= place < len(self._block_ids) else NOT_WANTED

    def register(self, num_blocks: int, group: str) -> None:
        """Make findable what was loaded of the prefix's first `num_blocks` blocks."""
        for index in range(self._first, min(num_blocks, self._first + len(self._block_ids))):
            self._pool.register(self.block(index), self._keys[index], group)

    def release(self) -> None:
        """Release all blocks."""
        self._pool.release(self._held_ids)
        self._pool.release(self._block_ids)
        self._held_ids, self._block_ids = [], []
