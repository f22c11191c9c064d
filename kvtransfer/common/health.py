"""The pauses after failures of one thing, which double up to a limit."""

from __future__ import annotations

FIRST_S = 1.0
MAX_S = 60.0
# 2 to this power exceeds every ratio of a limit to a first pause.
_MAX_DOUBLINGS = 60
JITTER = 0.25
_JITTER_STEPS = 1001


def backoff_s(num_failures: int, first_s: float, max_s: float) -> float:
    """Return the pause after `num_failures` (at least 1) failures in a row."""
    return min(first_s * 2.0 ** min(num_failures - 1, _MAX_DOUBLINGS), max_s)


def spread_s(pause_s: float, drawn: int) -> float:
    """Return a pause that is up to `JITTER` longer, by a number that was drawn: waiters for the same thing
    then do not all come back at once."""
    return pause_s * (1 + JITTER * (drawn % _JITTER_STEPS) / (_JITTER_STEPS - 1))


class Backoff:
    """Counts the failures in a row of one thing, for a loop that tries again after each. Not thread-safe."""

    def __init__(self, first_s: float = FIRST_S, max_s: float = MAX_S) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._num_failures = 0

    def failed(self) -> float:
        """Count a failure; return the pause before the next try."""
        self._num_failures += 1
        return backoff_s(self._num_failures, self._first_s, self._max_s)

    def reset(self) -> None:
        """Forget the failures: a try succeeded."""
        self._num_failures = 0


class CoolDown:
    """The pause in which one thing must not be tried, and the failure that began it. Not thread-safe."""

    def __init__(self, first_s: float = FIRST_S, max_s: float = MAX_S) -> None:
        # The last failure; "" when the last try succeeded.
        self.reason = ""
        self._backoff = Backoff(first_s, max_s)
        self._ends_at = 0.0

    def failed(self, reason: str, now: float) -> None:
        """Begin a pause. Failures during a pause, of tries that had begun before, do not extend the pause."""
        self.reason = reason
        if self.remaining_s(now) == 0:
            self._ends_at = now + self._backoff.failed()

    def succeeded(self, now: float) -> None:
        """Reset the back-off. Tries that had begun before the pause do not end it."""
        if self.reason and self.remaining_s(now) == 0:
            self.reason = ""
            self._backoff.reset()

    def remaining_s(self, now: float) -> float:
        """Return how long the pause still lasts; 0.0: there is none."""
        return max(0.0, self._ends_at - now) if self.reason else 0.0
