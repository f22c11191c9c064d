"""Keep blocks that a plan copies from until that plan is reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class ReleasingPool(Protocol):
    """A pool of blocks with references."""

    def release(self, block_ids: Sequence[int]) -> None: ...


class CopiedBlocks:
    """The sources of copies in plans that are not reported, of one pool. One that is given back is retired:
    it keeps its reference until its plan is settled."""

    def __init__(self, pool: ReleasingPool) -> None:
        self._pool = pool
        self._block_to_step: dict[int, int] = {}
        # As they were given back, which is the order in which they are released.
        self._retired: list[list[int]] = []

    @property
    def num_references(self) -> int:
        """References of retired blocks."""
        return sum(map(len, self._retired))

    def retired(self) -> Iterator[int]:
        """Yield the retired blocks."""
        for block_ids in self._retired:
            yield from block_ids

    def note(self, block_id: int, step: int) -> None:
        """Note that the plan of a step reads the block."""
        self._block_to_step[block_id] = step

    def is_read(self, block_ids: Sequence[int]) -> bool:
        """Whether an unreported plan reads one of these blocks."""
        return not self._block_to_step.keys().isdisjoint(block_ids)

    def give_back(self, block_ids: list[int]) -> None:
        """Release blocks as the pool does, or retire them if an unreported plan reads one."""
        if self.is_read(block_ids):
            self._retired.append(block_ids)
        else:
            self._pool.release(block_ids)

    def settle(self, step: int) -> None:
        """Release what only plans up to `step`, which are reported, have read."""
        self._block_to_step = {block: its for block, its in self._block_to_step.items() if its > step}
        retired, self._retired = self._retired, []
        for block_ids in retired:  # each may have been copied again since
            self.give_back(block_ids)
