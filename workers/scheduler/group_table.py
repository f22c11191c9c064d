"""The block table of one sequence in one group of layers behind the first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from kvtransfer.messages import BlockSpan


class GroupTable(ABC):
    """Blocks by the index that they have among the sequence's blocks. What ranks know of the table are the
    blocks that `unsent` has returned, and that were not changed since."""

    __slots__ = ("_unsent", "kept_border", "num_registered")

    def __init__(self) -> None:
        # Below this index all blocks were made findable, or cannot be.
        self.num_registered = 0
        # The last border at which a state is kept for others: without the next one, a prompt begins there.
        self.kept_border = 0
        self._unsent: set[int] = set()

    @property
    @abstractmethod
    def block_ids(self) -> Sequence[int]:
        """The blocks, in the order of their indices."""

    @property
    @abstractmethod
    def first(self) -> int:
        """The index of the first block; an empty table may begin anywhere."""

    @property
    @abstractmethod
    def end(self) -> int:
        """The index after the last block."""

    @abstractmethod
    def has(self, index: int) -> bool:
        """Whether there is a block at the index."""

    @abstractmethod
    def block(self, index: int) -> int:
        """Return the block at an index of the table."""

    @abstractmethod
    def written(self, start: int, end: int) -> Iterable[int]:
        """Return the indices of the blocks that tokens [start, end) are computed into, of which those that
        the table does not have follow on its last."""

    @abstractmethod
    def fitting_end(self, start: int, end: int, num_free: int, is_foreign: Callable[[int], bool]) -> int:
        """Return the most tokens, at most `end`, up to which tokens from `start` on have blocks if the table
        takes `num_free` more, one for each block that it needs and that `is_foreign`; `start` if none."""

    @abstractmethod
    def most_new_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a chunk of so many tokens takes, and the token behind it."""

    @abstractmethod
    def completed(self, num_tokens: int) -> Iterable[int]:
        """Return the indices of blocks that are complete behind `num_tokens` tokens, and that were not made
        findable."""

    @abstractmethod
    def passed_on(self, num_tokens: int) -> BlockSpan:
        """Return what another replica gets of the table, to continue behind `num_tokens` tokens."""

    @abstractmethod
    def covers(self, num_tokens: int) -> bool:
        """Whether the table has the block of the last of so many tokens."""

    @abstractmethod
    def copy(self) -> GroupTable:
        """Return a table with the same blocks, of which ranks know none."""

    def put(self, index: int, block_id: int) -> None:
        """Put a block into the table, in place of another one or behind all. The next plan that names the
        sequence tells the ranks."""
        self._put(index, block_id)
        self._unsent.add(index)

    def drop_before(self, first: int) -> dict[int, int]:
        """Cut the blocks before an index off, and return them by their indices."""
        self._unsent = {index for index in self._unsent if index >= first}
        return self._drop_before(first)

    @property
    def num_unsent(self) -> int:
        """The blocks that ranks do not know."""
        return len(self._unsent)

    def take_unsent(self) -> list[int]:
        """Return the indices of the blocks that ranks do not know, ascending. They will know them."""
        unsent, self._unsent = sorted(self._unsent), set()
        return unsent

    def forget_sent(self) -> None:
        """Note that the ranks know nothing of the table any more."""
        self._unsent = {index for index in range(self.first, self.end) if self.has(index)}

    @abstractmethod
    def _put(self, index: int, block_id: int) -> None: ...

    @abstractmethod
    def _drop_before(self, first: int) -> dict[int, int]: ...
