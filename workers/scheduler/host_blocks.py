"""Track which sequence uses which block of the ranks' offload pools, the KV of a replica in host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq


class HostBlocks:
    """Counts the uses of `num_total` blocks, with the ids from `first_id` on: below are those of the device.
    A block is free or has as many references as sequences use it. No index, transfer or store knows these
    blocks."""

    def __init__(self, first_id: int, num_total: int) -> None:
        self.num_total = num_total
        self._first_id = first_id
        self._free = list(range(first_id + num_total - 1, first_id - 1, -1))
        self._refs: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_total - len(self._free)

    def holds(self, block_id: int) -> bool:
        """Whether the id is one of these blocks."""
        return block_id >= self._first_id

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one sequence uses the block."""
        return self._refs[block_id] > 1

    def split(self, block_ids: Seq[int]) -> tuple[list[int], list[int]]:
        """Return the blocks on the device and the blocks here, each in their order."""
        if not self.num_used:
            return list(block_ids), []
        on_device = [block_id for block_id in block_ids if block_id < self._first_id]
        return on_device, [block_id for block_id in block_ids if block_id >= self._first_id]

    def allocate(self) -> int:
        """Return a free block, with one reference; there must be one."""
        block_id = self._free.pop()
        self._refs[block_id] = 1
        return block_id

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; the blocks are used."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is free: it holds nothing"
            self._refs[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} has no reference to release"
            self._refs[block_id] -= 1
            if not self._refs[block_id]:
                del self._refs[block_id]
                self._free.append(block_id)

    def check(self, references: Counter[int]) -> None:
        """Assert that `references`, by block, are all there are, and that every other block is free."""
        assert references == self._refs, "the offload pool counts other references than the sequences hold"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        every = set(range(self._first_id, self._first_id + self.num_total))
        assert set(self._free) | set(self._refs) == every
        assert not set(self._free) & set(self._refs)
