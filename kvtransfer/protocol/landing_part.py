"""The blocks that an open landing has in each group of layers, and how many tokens are valid in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.blocks.group_prefix import first_needed_block
from kvtransfer.messages import BlockSpan
from kvtransfer.protocol.verification import Verification


class BlockOwner(Protocol):
    """The part of any pool that gives the blocks of a landing back."""

    def release(self, block_ids: Sequence[int]) -> None: ...
    def quarantine(self, block_ids: Sequence[int]) -> None: ...
    def release_quarantine(self, block_ids: Sequence[int]) -> None: ...


@dataclass(slots=True)
class LandingPart:
    """A landing's blocks in one group of layers. `held` were cached here. `written` take the sequence's
    blocks from `first` on, which follow those that are held, if any."""

    pool: BlockOwner
    # How many tokens the layers look back, the newest included; 0: over all.
    window: int
    held: list[int]
    first: int
    written: list[int]

    @property
    def lowest(self) -> int:
        """The first of the sequence's blocks that is here."""
        return self.first - len(self.held)

    @property
    def num_references(self) -> int:
        return len(self.held) + len(self.written)

    def quarantine(self) -> None:
        """Give back what no writer can touch, and keep the rest until `release_quarantine`."""
        self.pool.release(self.held)
        self.held = []
        self.pool.quarantine(self.written)

    def release_quarantine(self) -> None:
        """Free the blocks: no writer can touch them any more."""
        self.pool.release_quarantine(self.written)

    def release(self) -> None:
        """Free all blocks of an open landing."""
        self.pool.release(self.held)
        self.pool.release(self.written)

    def first_needed(self, num_tokens: int, block_tokens: int) -> int:
        """Return the first block that is needed to continue behind `num_tokens` tokens."""
        return first_needed_block(num_tokens, self.window, block_tokens) if self.window else 0

    def allows(self, end: int, num_tokens: int, group: int, pieces: Verification, block_tokens: int) -> bool:
        """Return whether this group, of this number, has what it needs to continue behind `end` of the
        sequence's `num_tokens` tokens: blocks that are held or good.

        The writer frees a block that has come behind the window of its sequence, even while it is pushed: so
        one that was written counts only if the whole sequence needs it."""
        first = self.first_needed(end, block_tokens)
        if first < self.lowest:
            return False
        oldest = self.first_needed(num_tokens, block_tokens)
        written = range(max(first, self.first), -(-end // block_tokens))
        return all(block >= oldest and pieces.is_good(group, block) for block in written)

    def pass_on(self, num_valid_tokens: int, block_tokens: int) -> BlockSpan:
        """Return the blocks that are needed to continue behind the valid tokens, and those that follow; free
        the others. They are all others where no token is valid."""
        block_ids = (*self.held, *self.written)
        if num_valid_tokens == 0:
            self.pool.release(block_ids)
            return BlockSpan(0, ())
        first = self.first_needed(num_valid_tokens, block_tokens)
        num_behind = first - self.lowest
        self.pool.release(block_ids[:num_behind])
        return BlockSpan(first, block_ids[num_behind:])


def num_valid_tokens(
    parts: Sequence[LandingPart], pieces: Verification, num_tokens: int, block_tokens: int
) -> int:
    """Return behind how many of the sequence's `num_tokens` tokens it can continue: all, or those up to the
    last border between blocks behind which each group has the blocks that it needs, held or good."""
    full, *behind = parts
    num_good = len(full.held) + pieces.num_good_blocks()

    def can_continue(end: int) -> bool:
        return all(
            part.allows(end, num_tokens, group, pieces, block_tokens)
            for group, part in enumerate(behind, start=1)
        )

    if num_good * block_tokens >= num_tokens and can_continue(num_tokens):
        return num_tokens
    borders = range(min(num_good, num_tokens // block_tokens), 0, -1)
    return next((it * block_tokens for it in borders if can_continue(it * block_tokens)), 0)
