"""The block table of one sequence in a group of layers that keep a recurrent state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtransfer.messages import BlockSpan
from workers.scheduler.group_table import GroupTable


class StateTable(GroupTable):
    """The few blocks of a sequence that hold its state: the block at an index has the state behind the last
    token that was computed of that block of the sequence. A plan reads the block of the token before its
    first, and leaves the state in the block of its last, which may be the same. Those between are never
    there.

    The tokens of a block cannot be taken back, as drafts that are rejected would be: that takes a copy of the
    state from before them."""

    __slots__ = ("_block_tokens", "_index_to_block")

    def __init__(self, first: int, block_ids: Iterable[int], block_tokens: int) -> None:
        super().__init__()
        self._index_to_block = dict(enumerate(block_ids, first))
        self._block_tokens = block_tokens
        self.forget_sent()

    @property
    def block_ids(self) -> Sequence[int]:
        return list(self._index_to_block.values())

    @property
    def first(self) -> int:
        return next(iter(self._index_to_block), 0)

    @property
    def end(self) -> int:
        return next(reversed(self._index_to_block), -1) + 1

    def has(self, index: int) -> bool:
        return index in self._index_to_block

    def block(self, index: int) -> int:
        return self._index_to_block[index]

    def written(self, start: int, end: int) -> Iterable[int]:
        return ((end - 1) // self._block_tokens,)

    def fitting_end(self, start: int, end: int, num_free: int, is_foreign: Callable[[int], bool]) -> int:
        if num_free > 0:
            return end
        working = start // self._block_tokens
        if not self.has(working) or is_foreign(self.block(working)):
            return start
        return min(end, (working + 1) * self._block_tokens)

    def most_new_blocks(self, num_tokens: int) -> int:
        return 2

    def completed(self, num_tokens: int) -> Iterable[int]:
        """Return the block whose border is exactly behind `num_tokens` tokens: the state behind an earlier
        border is gone, or was never there."""
        index, num_in_block = divmod(num_tokens, self._block_tokens)
        is_complete = num_in_block == 0 and self.num_registered < index and self.has(index - 1)
        return (index - 1,) if is_complete else ()

    def passed_on(self, num_tokens: int) -> BlockSpan:
        """Return the block with the state behind `num_tokens` tokens. Plans that are out may change it."""
        index = (num_tokens - 1) // self._block_tokens
        return BlockSpan(index, (self.block(index),)) if self.has(index) else BlockSpan(0, ())

    def covers(self, num_tokens: int) -> bool:
        return num_tokens == 0 or self.has((num_tokens - 1) // self._block_tokens)

    def copy(self) -> StateTable:
        made = StateTable(0, (), self._block_tokens)
        made._index_to_block = dict(self._index_to_block)
        made.num_registered = self.num_registered
        made.kept_border = self.kept_border
        made.forget_sent()
        return made

    def _put(self, index: int, block_id: int) -> None:
        assert index in self._index_to_block or index >= self.end, "states follow one another"
        self._index_to_block[index] = block_id

    def _drop_before(self, first: int) -> dict[int, int]:
        dropped = {index: block for index, block in self._index_to_block.items() if index < first}
        for index in dropped:
            del self._index_to_block[index]
        return dropped
