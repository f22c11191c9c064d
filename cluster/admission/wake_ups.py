"""Wake the admission of a gateway when something is due, or when work is left for the next turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvtransfer.common.clock import Clock


class WakeUps:
    """Schedules the calls of one function."""

    def __init__(
        self, call_at: Callable[[float, Callable[[], None]], object], clock: Clock, act: Callable[[], None]
    ) -> None:
        """`call_at` calls at a time of the clock, in a later turn of the event loop."""
        self._call_at = call_at
        self._clock = clock
        self._act = act
        # The times of the coming calls, each before those that were scheduled earlier.
        self._times: list[float] = []
        # Whether the next turn of the loop continues the work.
        self.is_continuing = False

    def wake_by(self, at: float) -> None:
        """Call at this time, unless a call comes before."""
        if not self._times or at < self._times[-1]:
            self._times.append(at)
            self._call_at(at, partial(self._wake, at))

    def continue_soon(self) -> None:
        """Call in the next turn of the event loop, once."""
        if not self.is_continuing:
            self.is_continuing = True
            self._call_at(self._clock.now(), self._continue)

    def _wake(self, at: float) -> None:
        self._times.remove(at)
        self._act()

    def _continue(self) -> None:
        self.is_continuing = False
        self._act()
