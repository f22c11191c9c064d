"""Work for many requests at once, divided so that the event loop handles I/O in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

# Each may place a request again, which takes a few hundred microseconds.
MOST_CALLS = 8


class LoopSlices:
    """Runs calls in the order in which they come, at most `MOST_CALLS` in a turn of the event loop: the first
    ones at once, where nothing waits, and the others in later turns."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        # A turn runs, or is scheduled.
        self._is_due = False

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, calls: Iterable[Callable[[], object]]) -> None:
        """Run these after all that wait."""
        self._calls.extend(calls)
        if not self._is_due:
            self._turn()

    async def done(self) -> None:
        """Return when all that waits now has run."""
        have_run = asyncio.Event()
        self.add([have_run.set])
        await have_run.wait()

    def _turn(self) -> None:
        self._is_due = True
        try:
            for _ in range(min(MOST_CALLS, len(self._calls))):
                self._calls.popleft()()
        finally:
            self._is_due = bool(self._calls)
            if self._is_due:
                asyncio.get_running_loop().call_soon(self._turn)
