"""The block table of one sequence in one group of layers with a window."""

from __future__ import annotations

from collections.abc import Iterable


class WindowTable:
    """The blocks of a sequence from its block `first` on: those before it are behind the window. Indices are
    those of the sequence's blocks."""

    __slots__ = ("block_ids", "first", "num_registered", "num_sent", "replaced")

    def __init__(self, first: int, block_ids: Iterable[int]) -> None:
        self.first = first
        self.block_ids = list(block_ids)
        # Below this index all blocks were made findable, or cannot be.
        self.num_registered = 0
        # What the ranks know: the blocks below this index, but for those that were `replaced` since.
        self.num_sent = 0
        self.replaced: set[int] = set()

    @property
    def end(self) -> int:
        """The index after the last block."""
        return self.first + len(self.block_ids)

    def block(self, index: int) -> int:
        """Return the block at an index of the table."""
        return self.block_ids[index - self.first]

    def replace(self, index: int, block_id: int) -> None:
        """Put another block into the table. The next plan that names the sequence tells the ranks."""
        self.block_ids[index - self.first] = block_id
        if index < self.num_sent:
            self.replaced.add(index)

    def drop_before(self, first: int) -> list[int]:
        """Cut the blocks before an index off, and return them."""
        dropped = self.block_ids[: first - self.first]
        self.block_ids = self.block_ids[first - self.first :]
        self.first = first
        self.replaced = {index for index in self.replaced if index >= first}
        return dropped

    def forget_sent(self) -> None:
        """Note that the ranks know nothing of the table any more."""
        self.num_sent = 0
        self.replaced.clear()
