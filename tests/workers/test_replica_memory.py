"""What a replica keeps of requests that are over: nothing, beside caches that are full."""

from __future__ import annotations

import gc
import itertools
import random
import sys
from collections import Counter

from replica_harness import MigrationPair

NUM_REQUESTS = 100


def serve(pair: MigrationPair, draw: random.Random) -> None:
    """Short requests at both replicas, of which some are cancelled."""
    for number in range(NUM_REQUESTS):
        prompt = [draw.randrange(3, 60) for _ in range(draw.randrange(4, 10))]
        stream = pair.submit(prompt, 4, pair.sides[number % 2])
        if number % 5 == 0:
            pair.cancel(stream)
        pair.run()
        pair.check_over()
        pair.streams.clear()


def num_by_type() -> Counter[str]:
    """Count what the garbage collector tracks."""
    gc.collect()
    return Counter(type(it).__name__ for it in gc.get_objects())


async def test_requests_that_are_over_leave_nothing_behind() -> None:
    pair, draw = MigrationPair(), random.Random(3)
    serve(pair, draw)
    before = num_by_type()
    nums_of_blocks: list[int] = []
    for _ in range(4):
        serve(pair, draw)
        gc.collect()
        nums_of_blocks.append(sys.getallocatedblocks())
    grown = {name: num for name, num in num_by_type().items() if num > before[name] + NUM_REQUESTS / 2}
    assert grown == {}
    # What is kept of each request, if only its id, is a block of memory for each, in every round.
    assert min(after - before for before, after in itertools.pairwise(nums_of_blocks)) < NUM_REQUESTS / 2
