"""Keep blocks that a plan copies from until that plan is reported."""

from __future__ import annotations

from collections.abc import Sequence

from workers.scheduler.window_pool import WindowPool


class CopiedBlocks:
    """The sources of copies in plans that are not reported, of one pool. One that is given back is retired:
    it keeps its reference until its plan is settled."""

    def __init__(self, pool: WindowPool) -> None:
        self._pool = pool
        self._block_to_step: dict[int, int] = {}
        self._retired: list[int] = []

    @property
    def num_references(self) -> int:
        """References of retired blocks."""
        return len(self._retired)

    def note(self, block_id: int, step: int) -> None:
        """Note that the plan of a step reads the block."""
        self._block_to_step[block_id] = step

    def give_back(self, block_ids: Sequence[int], *, passed: bool = False) -> None:
        """Release blocks as the pool does, but for those that an unreported plan reads."""
        if self._block_to_step.keys().isdisjoint(block_ids):
            self._pool.release(block_ids, passed=passed)
        else:
            self._retired += block_ids

    def settle(self, step: int) -> None:
        """Release what only plans up to `step`, which are reported, have read."""
        self._block_to_step = {block: its for block, its in self._block_to_step.items() if its > step}
        retired, self._retired = self._retired, []
        for block_id in retired:  # each may have been copied again since
            self.give_back([block_id])
