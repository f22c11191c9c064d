"""The longest prefix that is cached for all groups, beside a search of every border."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.blocks.group_prefix import first_needed_block, match_prefix
from kvtransfer.messages import BlockSpan

BLOCK_TOKENS = 4


class Full:
    """Holds the first blocks of every prompt, under the ids 100 and up."""

    def __init__(self, num_held: int) -> None:
        self._num_held = num_held

    def match(self, keys: Sequence[bytes]) -> list[int]:
        return [100 + index for index in range(min(len(keys), self._num_held))]


class Windowed:
    """Holds some blocks, by their index."""

    def __init__(self, window: int, held: set[int]) -> None:
        self.window, self.held = window, held
        self.num_free = self.num_total = 0
        self.has_states = False

    def find(self, key: bytes) -> int | None:
        return key[0] if key[0] in self.held else None

    def acquire(self, block_ids: Sequence[int]) -> None: ...

    def allocate(self, num_blocks: int) -> list[int]:
        return []

    def release(self, block_ids: Sequence[int]) -> None: ...

    def quarantine(self, block_ids: Sequence[int]) -> None: ...

    def release_quarantine(self, block_ids: Sequence[int]) -> None: ...


def seen(position: int, window: int) -> set[int]:
    """The blocks of the tokens that a token sees, but those that are computed with it."""
    return {token // BLOCK_TOKENS for token in range(max(0, position - window + 1), position)}


@pytest.mark.parametrize(
    ("num_tokens", "window", "first"), [(0, 4, 0), (4, 5, 0), (5, 5, 0), (8, 5, 1), (9, 5, 1), (12, 1, 3)]
)
def test_blocks_behind_the_window_are_not_needed(num_tokens: int, window: int, first: int) -> None:
    assert first_needed_block(num_tokens, window, BLOCK_TOKENS) == first
    assert min(seen(num_tokens, window), default=first) == first


@given(
    st.integers(0, 8),
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(1, 20), st.sets(st.integers(0, 7))), max_size=3),
    st.none() | st.integers(0, 12),
)
def test_a_prefix_is_the_longest_that_all_groups_have(
    num_keys: int, num_held: int, groups: list[tuple[int, set[int]]], num_more: int | None
) -> None:
    keys = [bytes([index]) for index in range(num_keys)]
    windows = [Windowed(*group) for group in groups]
    num_tokens = None if num_more is None else num_keys * BLOCK_TOKENS + num_more
    prefix = match_prefix(Full(num_held), windows, keys, BLOCK_TOKENS, num_tokens)

    def needed(border: int, window: int) -> set[int]:
        """What the next token sees of the first `border` blocks."""
        position = border * BLOCK_TOKENS if num_tokens is None else num_tokens
        return {block for block in seen(position, window) if block < border}

    borders = [
        border
        for border in range(min(num_keys, num_held) + 1)
        if all(needed(border, window) <= held for window, held in groups)
    ]
    longest = max(borders)
    assert prefix.block_ids == [100 + index for index in range(longest)]
    for blocks, (window, _) in zip(prefix.windows, groups, strict=True):
        assert set(blocks.block_ids) == needed(longest, window)
        assert list(blocks.block_ids) == list(range(blocks.first, longest))
    assert isinstance(prefix.windows, tuple)
    assert all(isinstance(blocks, BlockSpan) for blocks in prefix.windows)
