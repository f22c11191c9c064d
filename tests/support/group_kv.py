"""Models of the memory of groups of layers behind the first: the tokens that layers with a window see, and
the tokens behind which a state is."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvtransfer.messages import STATE_WINDOW
from workers.messages.rank_channel import BlockCopy
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool


class GroupRow(NamedTuple):
    """What a sequence computes of a plan: the tokens from `start` to the end of its `context`, with its
    blocks by index."""

    start: int
    table: Mapping[int, int]
    context: Sequence[int]


class GroupKv(ABC):
    """The memory of one group by (block, offset)."""

    def __init__(self, block_tokens: int) -> None:
        self.kv: dict[tuple[int, int], int] = {}
        self._block_tokens = block_tokens

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        self.kv |= {
            (copy.dst_block, offset): self.kv[copy.src_block, offset]
            for copy in copies
            for offset in range(self._block_tokens)
            if (copy.src_block, offset) in self.kv
        }

    @abstractmethod
    def compute(self, rows: Sequence[GroupRow]) -> None:
        """Compute what a plan has of this group, and assert that it finds the right things."""

    @abstractmethod
    def read_blocks(self, start: int, end: int, table: Mapping[int, int]) -> set[int]:
        """Return the blocks that a plan for tokens [start, end) reads and writes."""


class WindowKv(GroupKv):
    """The tokens of a group whose layers look back `window` tokens."""

    def __init__(self, window: int, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._window = window

    def compute(self, rows: Sequence[GroupRow]) -> None:
        written: set[tuple[int, int]] = set()
        for row in rows:
            for position in range(row.start, len(row.context)):
                place = self._place(row.table, position)
                assert place not in written, "two entries of a plan write one place"
                written.add(place)
                self.kv[place] = row.context[position]
        for row in rows:
            seen = range(max(0, row.start - self._window + 1), len(row.context))
            found = [self.kv[self._place(row.table, position)] for position in seen]
            assert found == [row.context[position] for position in seen], "a window has other KV"

    def read_blocks(self, start: int, end: int, table: Mapping[int, int]) -> set[int]:
        first = max(0, start - self._window + 1) // self._block_tokens
        return {table[index] for index in range(first, (end - 1) // self._block_tokens + 1)}

    def _place(self, table: Mapping[int, int], position: int) -> tuple[int, int]:
        return table[position // self._block_tokens], position % self._block_tokens


class StateKv(GroupKv):
    """The states of a group: at offset 0 of a block is a number that says behind which tokens it is."""

    def compute(self, rows: Sequence[GroupRow]) -> None:
        touched: set[int] = set()
        for row in rows:
            blocks = self.read_blocks(row.start, len(row.context), row.table)
            written = row.table[(len(row.context) - 1) // self._block_tokens]
            others = {it.table[(len(it.context) - 1) // self._block_tokens] for it in rows if it is not row}
            assert not blocks & others, "a sequence reads or writes the state that another one writes"
            assert written not in touched
            touched.add(written)
            if row.start:
                before = row.table[(row.start - 1) // self._block_tokens]
                assert self.kv.get((before, 0)) == state_of(row.context[: row.start]), "a wrong state"
        for row in rows:
            self.kv[row.table[(len(row.context) - 1) // self._block_tokens], 0] = state_of(row.context)

    def spoil(self, block_id: int) -> None:
        """Change what a failed step may have changed."""
        self.kv[block_id, 0] = -1

    def read_blocks(self, start: int, end: int, table: Mapping[int, int]) -> set[int]:
        positions = [start - 1, end - 1] if start else [end - 1]
        return {table[position // self._block_tokens] for position in positions}


def state_of(tokens: Sequence[int]) -> int:
    """Return a number for the state behind these tokens."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return int.from_bytes(hashlib.sha256(packed).digest()[:6], "little")


class GroupSizes(NamedTuple):
    """The groups behind the first: window and blocks of each with a window, and the blocks of each with
    states, which come behind those."""

    windows: Sequence[tuple[int, int]] = ()
    states: Sequence[int] = ()

    @property
    def num_groups(self) -> int:
        return len(self.windows) + len(self.states)

    def pools(self, kv: BlockPool) -> list[GroupPool]:
        pools = [GroupPool(*each, kv=kv) for each in self.windows]
        return pools + [GroupPool(STATE_WINDOW, each, has_states=True, kv=kv) for each in self.states]

    def memory(self, block_tokens: int) -> list[GroupKv]:
        windows: list[GroupKv] = [WindowKv(window, block_tokens) for window, _ in self.windows]
        return windows + [StateKv(block_tokens) for _ in self.states]


NO_GROUPS = GroupSizes()
