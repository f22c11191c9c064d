"""What a process keeps of requests that are over, counted: objects by their type, and blocks of memory."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Iterator


def num_by_type() -> Counter[str]:
    """Count the objects that the garbage collector tracks."""
    return Counter(str(type(it)) for it in gc.get_objects())


class KeptObjects:
    """Counts after every round of as many requests. What is kept of each of them, if only its id, is an
    object, or a block of memory, for each in every round."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        gc.collect()
        self._types = num_by_type()
        self._nums_of_blocks: list[int] = []

    def count(self) -> None:
        """Count the blocks after a round. The interpreter's cache of attributes is emptied: each `match` of a
        class leaves a name in it, until it is full after thousands of them."""
        gc.collect()
        sys._clear_type_cache()
        self._nums_of_blocks.append(sys.getallocatedblocks())

    def check(self) -> None:
        """Assert that nothing grows by as much as half an object for each request of a round; of blocks, not
        in every two rounds: some come and go."""
        limit = self._num_requests / 2
        blocks = self._nums_of_blocks
        growth = [after - before for before, after in zip(blocks, blocks[2:], strict=False)]
        assert min(growth) < 2 * limit, blocks
        grown = num_by_type() - self._types
        kept = {name: num for name, num in grown.items() if num > limit * len(blocks)}
        assert not kept, kept


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Keep the collector from finding cycles within: objects that are part of one stay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
