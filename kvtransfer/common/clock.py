"""Time as an argument: the only module that reads the clock or sleeps."""

from __future__ import annotations

import asyncio
import heapq
import time
from typing import Protocol


class Clock(Protocol):
    """What every timed class receives instead of the `time` module."""

    def now(self) -> float:
        """Return monotonic seconds; comparable between processes of one host, not between hosts."""

    def wall(self) -> float:
        """Return the Unix time in seconds, for records that people read."""

    async def sleep(self, delay_s: float) -> None:
        """Return after `delay_s` seconds of this clock."""


def thread_cpu_s() -> float:
    """Return the processor time that this thread has used."""
    return time.thread_time()


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


class ManualClock:
    """A clock that moves only by `advance`: for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._num_sleeps = 0

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    async def sleep(self, delay_s: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_sleeps += 1
        heapq.heappush(self._sleepers, (self._now + delay_s, self._num_sleeps, future))
        await future

    def advance(self, delta_s: float) -> None:
        """Move time forward and wake every sleeper that is due, in order."""
        self._now += delta_s
        if self._sleepers:
            self._wake()

    def advance_to(self, time_s: float) -> None:
        """Move time forward to this moment, as `advance`; one that is past changes nothing."""
        if time_s > self._now:
            self._now = time_s
        if self._sleepers:
            self._wake()

    def _wake(self) -> None:
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)


async def give_way() -> None:
    """Let the other tasks of the event loop that are ready go first."""
    await asyncio.sleep(0)


def let_others_run() -> None:
    """Give the interpreter from a busy thread to a thread that waits for it, such as an event loop."""
    time.sleep(0)
