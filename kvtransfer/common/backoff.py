"""When something that failed may be tried again: after a pause that doubles with every failure in a row."""

from __future__ import annotations

FIRST_S = 1.0
MAX_S = 60.0


class CoolDown:
    """Of one thing. Not thread-safe."""

    def __init__(self, first_s: float = FIRST_S, max_s: float = MAX_S) -> None:
        # Of the last failure; "" when the last try succeeded.
        self.reason = ""
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s
        self._ends_at = 0.0

    def failed(self, reason: str, now: float) -> None:
        """Failures while a pause lasts, of tries that had begun before, do not make it longer."""
        self.reason = reason
        if self.remaining_s(now) == 0:
            self._ends_at = now + self._next_s
            self._next_s = min(2 * self._next_s, self._max_s)

    def succeeded(self, now: float) -> None:
        """Tries that had begun before the pause do not end it."""
        if self.reason and self.remaining_s(now) == 0:
            self.reason = ""
            self._next_s = self._first_s

    def remaining_s(self, now: float) -> float:
        """How long it must not be tried yet; 0.0: it may be."""
        return max(0.0, self._ends_at - now) if self.reason else 0.0
