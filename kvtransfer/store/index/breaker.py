"""When to stop asking a server that does not answer in time, and when to try it again (sans-I/O).

closed --`budget` failures in a row--> open --a probe is answered in time--> closed
                                       open --a probe fails--> open, for twice as long as before
"""

from __future__ import annotations

from kvtransfer.common.health import Backoff

FAILURE_BUDGET = 5
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class Breaker:
    """Starts open, with a probe due: nobody waits for what was never reached."""

    def __init__(
        self,
        budget: int = FAILURE_BUDGET,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self._budget = budget
        self._backoff = Backoff(first_pause_s, longest_pause_s)
        self._num_failures = budget
        self._probe_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether only probes may query the server."""
        return self._num_failures >= self._budget

    def succeeded(self) -> None:
        """Note that an answer came in time. Only a probe's answer closes an open breaker (`probed`)."""
        if not self.is_open:
            self._num_failures = 0

    def failed(self, now: float) -> None:
        """Note that a question went wrong or was not answered in time."""
        if not self.is_open:
            self._num_failures += 1
            if self.is_open:
                self._start_pauses(now)

    def trip(self, now: float) -> None:
        """Open the breaker because it is known from elsewhere that nothing would be answered."""
        if not self.is_open:
            self._num_failures = self._budget
            self._start_pauses(now)

    def probe_in_s(self, now: float) -> float:
        """Return the seconds until the next probe, while open."""
        return max(0.0, self._probe_at - now)

    def probed(self, is_well: bool, now: float) -> None:
        """Note the outcome of a probe."""
        if is_well:
            self._num_failures = 0
        else:
            self._pause(now)

    def _start_pauses(self, now: float) -> None:
        self._backoff.reset()
        self._pause(now)

    def _pause(self, now: float) -> None:
        self._probe_at = now + self._backoff.failed()
