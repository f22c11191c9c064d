"""The blocks of a group of layers with a window, for tests: each is free, referenced or in quarantine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class WindowBlockPool:
    """`num_blocks` blocks of a group whose layers look back `window` tokens. Those that can be found are
    referenced for as long as the test holds them."""

    def __init__(self, window: int, num_blocks: int) -> None:
        self.window = window
        self.num_total = num_blocks
        self.references: Counter[int] = Counter()
        self.quarantined: set[int] = set()
        self.key_to_block: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return self.num_total - len(self.references) - len(self.quarantined)

    def find(self, key: bytes) -> int | None:
        return self.key_to_block.get(key)

    def acquire(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert self.references[block], "a block that nobody holds has nothing"
            self.references[block] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        assert num_blocks <= self.num_free
        taken = self.references.keys() | self.quarantined
        block_ids = [block for block in range(self.num_total) if block not in taken][:num_blocks]
        self.references.update(block_ids)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert self.references[block] > 0, "a block is released twice"
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]

    def quarantine(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert self.references.pop(block) == 1, "a block that others hold may be written"
            self.quarantined.add(block)

    def release_quarantine(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.quarantined.remove(block)

    def check(self) -> None:
        """Assert that every block is in one state."""
        assert not self.references.keys() & self.quarantined
        assert self.num_free >= 0
