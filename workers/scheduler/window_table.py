"""The block table of one sequence in one group of layers with a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtransfer.messages import BlockSpan
from workers.scheduler.group_table import GroupTable


class WindowTable(GroupTable):
    """The blocks of a sequence from its block `first` on: those before it are behind the window."""

    __slots__ = ("_block_ids", "_block_tokens", "_first")

    def __init__(self, first: int, block_ids: Iterable[int], block_tokens: int) -> None:
        super().__init__()
        self._first = first
        self._block_ids = list(block_ids)
        self._block_tokens = block_tokens
        self.forget_sent()

    @property
    def block_ids(self) -> Sequence[int]:
        return self._block_ids

    @property
    def first(self) -> int:
        return self._first

    @property
    def end(self) -> int:
        return self._first + len(self._block_ids)

    def has(self, index: int) -> bool:
        return self._first <= index < self.end

    def block(self, index: int) -> int:
        return self._block_ids[index - self._first]

    def written(self, start: int, end: int) -> Iterable[int]:
        return range(max(start // self._block_tokens, self._first), -(-end // self._block_tokens))

    def fitting_end(self, start: int, end: int, num_free: int, is_foreign: Callable[[int], bool]) -> int:
        num_free -= sum(
            self.has(index) and is_foreign(self.block(index)) for index in self.written(start, end)
        )
        if num_free < 0:
            return start
        return min(end, (self.end + num_free) * self._block_tokens)

    def most_new_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens) + 1

    def completed(self, num_tokens: int) -> Iterable[int]:
        first = max(self.num_registered, self._first)
        return range(first, min(num_tokens // self._block_tokens, self.end))

    def passed_on(self, num_tokens: int) -> BlockSpan:
        return BlockSpan(self._first, tuple(self._block_ids))

    def covers(self, num_tokens: int) -> bool:
        return self.end * self._block_tokens >= num_tokens

    def copy(self) -> WindowTable:
        made = WindowTable(self._first, self._block_ids, self._block_tokens)
        made.num_registered = self.num_registered
        return made

    def _put(self, index: int, block_id: int) -> None:
        if index == self.end:
            self._block_ids.append(block_id)
        else:
            self._block_ids[index - self._first] = block_id

    def _drop_before(self, first: int) -> dict[int, int]:
        dropped = dict(enumerate(self._block_ids[: first - self._first], self._first))
        self._block_ids = self._block_ids[first - self._first :]
        self._first = first
        return dropped
