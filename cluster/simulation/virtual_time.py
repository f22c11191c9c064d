"""Virtual time: what is to happen, on a clock that jumps from each event to the next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from kvtransfer.common.clock import ManualClock


class EventQueue:
    """Calls in the order of their times; those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        # The calls that were made.
        self.num_events = 0

    @property
    def next_at(self) -> float:
        """The time of the next call; inf without any."""
        return self._due[0][0] if self._due else float("inf")

    def at(self, time_s: float, call: Callable[[], object]) -> None:
        """Call it at that time, or next if that is past."""
        heapq.heappush(self._due, (time_s, next(self._numbers), call))

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call it in so many seconds."""
        self.at(self.clock.now() + delay_s, call)

    def step(self) -> None:
        """Move to the time of the next call, and make it."""
        time_s, _, call = heapq.heappop(self._due)
        self.num_events += 1
        self.clock.advance_to(time_s)
        call()

    def run(self, until_s: float) -> None:
        """Let time pass until then."""
        while self._due and self.next_at <= until_s:
            self.step()
        self.clock.advance_to(until_s)
