"""Which blocks a group of layers with a window needs, and the longest prefix that is cached for all groups.

A token at position i sees the tokens j with i - window < j <= i. So a sequence that continues behind
`num_tokens` tokens needs those from num_tokens - window + 1 on, and a block behind that is of no use to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtransfer.messages import BlockSpan


class FullSource(Protocol):
    """The blocks of layers without a window, which can be found by key."""

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of `keys` that is cached; takes no reference."""


class GroupSource(Protocol):
    """The blocks of a group with a window or a state (see `workers.scheduler.group_pool.GroupPool`)."""

    @property
    def window(self) -> int: ...
    @property
    def has_states(self) -> bool: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_total(self) -> int: ...
    def find(self, key: bytes) -> int | None: ...
    def acquire(self, block_ids: Sequence[int]) -> None: ...
    def allocate(self, num_blocks: int) -> list[int]: ...
    def release(self, block_ids: Sequence[int]) -> None: ...
    def quarantine(self, block_ids: Sequence[int]) -> None: ...
    def release_quarantine(self, block_ids: Sequence[int]) -> None: ...


class Prefix(NamedTuple):
    """Cached blocks of a prefix, without a reference: those of layers without a window, and what each group
    with one needs of it, up to the same block."""

    block_ids: list[int]
    windows: tuple[BlockSpan, ...] = ()


def first_needed_block(num_tokens: int, window: int, block_tokens: int) -> int:
    """Return the first block that is needed to continue behind `num_tokens` tokens."""
    return max(0, num_tokens - window + 1) // block_tokens


def match_prefix(
    full: FullSource,
    groups: Sequence[GroupSource],
    keys: Sequence[bytes],
    block_tokens: int,
    num_tokens: int | None = None,
) -> Prefix:
    """Return the longest prefix of `keys` behind which all groups can continue. With `num_tokens`, what
    follows it up to so many tokens comes from elsewhere: groups need of it what is needed behind that."""
    block_ids = full.match(keys)
    if not groups:
        return Prefix(block_ids)
    found = [[group.find(key) for key in keys[: len(block_ids)]] for group in groups]
    # How many blocks without a gap end at each border, of each group.
    num_at_hand = [_runs(of_group) for of_group in found]
    for border in range(len(block_ids), 0, -1):
        end = border * block_tokens if num_tokens is None else num_tokens
        firsts = [min(first_needed_block(end, it.window, block_tokens), border) for it in groups]
        if all(runs[border] >= border - first for runs, first in zip(num_at_hand, firsts, strict=True)):
            held = [
                BlockSpan(first, tuple(block for block in of_group[first:border] if block is not None))
                for of_group, first in zip(found, firsts, strict=True)
            ]
            return Prefix(block_ids[:border], tuple(held))
    return Prefix([], tuple(BlockSpan(0, ()) for _ in groups))


def _runs(block_ids: Sequence[int | None]) -> list[int]:
    """Return, for each border between blocks and after the last, how many blocks before it are there without
    a gap."""
    runs = [0]
    for block_id in block_ids:
        runs.append(0 if block_id is None else runs[-1] + 1)
    return runs
