"""What a replica keeps of requests that are over: nothing, beside caches that are full."""

from __future__ import annotations

import random
from itertools import count

import pytest
from kept_objects import KeptObjects, num_by_type, without_collector
from replica_harness import MigrationPair, Side
from staged_engine import VOCABULARY

from kvtransfer.protocol.gate import RecentIds

NUM_REQUESTS = 100


class Load:
    """Short requests at both replicas: most are handed over, some move while they run, some are cancelled."""

    def __init__(self) -> None:
        self.pair = MigrationPair()
        self._draw = random.Random(3)
        self._numbers = count()
        for side in self.pair.sides:  # full at once
            side.replica.kv_receiver.landings._ended = RecentIds(8)

    def run(self, num_requests: int = NUM_REQUESTS) -> None:
        """Run so many more of them to their ends, one after the other."""
        for number in range(num_requests):
            self._serve(number)

    def _serve(self, number: int) -> None:
        pair, side = self.pair, self.pair.sides[number % 2]
        prompt = [self._draw.randrange(1, VOCABULARY) for _ in range(self._draw.randrange(4, 10))]
        stream = pair.submit(prompt, 4, side, name=f"r{next(self._numbers)}", hands_over=number % 4 != 2)
        if number % 4 == 2:
            start(side)
            pair.move(stream)
        if number % 5 == 0:
            pair.cancel(stream)
        pair.run()
        pair.check_over()
        assert stream.is_cancelled or stream.finish
        pair.streams.clear()
        for each in pair.sides:
            each._closed.clear()


def start(side: Side) -> None:
    """Let what was submitted there compute its prompt."""
    side.plan()
    side.settle()


@pytest.mark.slow
async def test_requests_that_are_over_leave_nothing_behind() -> None:
    load = Load()
    load.run()
    kept = KeptObjects(NUM_REQUESTS)
    for _ in range(5):
        load.run()
        kept.count()
    kept.check()


@pytest.mark.slow
async def test_requests_that_are_over_are_in_no_cycle() -> None:
    """In a process with so many objects as an engine core has, the garbage collector looks for old ones once
    in hours."""
    load = Load()
    load.run()
    with without_collector():
        before = num_by_type()
        load.run()
        grown = num_by_type() - before
    assert {name: num for name, num in grown.items() if num > NUM_REQUESTS / 2} == {}
