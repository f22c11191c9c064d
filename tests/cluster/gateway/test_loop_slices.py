"""What is done for many requests at once leaves the event loop to others in between."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

import pytest

from cluster.gateway.loop_slices import MOST_CALLS, LoopSlices


async def test_calls_run_in_their_order_few_in_a_turn() -> None:
    slices, done = LoopSlices(), list[int]()
    slices.add(partial(done.append, number) for number in range(100))
    assert done == list(range(MOST_CALLS)), "the first ones at once"
    slices.add([partial(done.append, 100)])
    num_done = [len(done)]
    while len(slices):
        await asyncio.sleep(0)
        num_done.append(len(done))
    assert done == list(range(101))
    assert max(after - before for before, after in itertools.pairwise(num_done)) <= MOST_CALLS


async def test_what_a_call_adds_comes_after_what_waits() -> None:
    slices, done = LoopSlices(), list[str]()
    slices.add([lambda: slices.add([partial(done.append, "third")]), partial(done.append, "second")])
    await slices.done()
    assert done == ["second", "third"]


async def test_a_call_that_fails_does_not_hold_up_the_others() -> None:
    slices, done = LoopSlices(), list[int]()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        slices.add([fail, partial(done.append, 1)])
    await slices.done()
    assert done == [1]
