"""Threads for work on callers' input, apart from the event loop, in which parties take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.text.bounded_process import PartyTurns

T = TypeVar("T")

# More would take the interpreter from the event loop, and cores from the replicas of the host.
NUM_THREADS = 2


class TextThreads:
    """A few threads, of which each party uses one at a time, whatever it has waiting."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, name)
        self._turns = PartyTurns()

    async def run(self, party: str, work: Callable[[], T]) -> T:
        """Return the result of `work` in a thread. A caller that is cancelled before the end keeps its turn
        until the thread is free."""
        async with self._turns.turn_of(party):
            job = self._executor.submit(work)
            done = asyncio.wrap_future(job)
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                if not job.cancel():
                    await _ended(done)
                raise

    def close(self) -> None:
        """End the threads, after their present work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


async def _ended(done: asyncio.Future[T]) -> None:
    """Return when the work has ended, however often this task is cancelled before."""
    while not done.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([done])
    if not done.cancelled():
        done.exception()  # nobody else retrieves it
