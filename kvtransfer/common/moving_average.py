"""How fast a tier gives and takes, measured from what it really does."""

from __future__ import annotations

# Busy seconds after which what was counted weighs half.
_MEMORY_S = 1.0
_WEIGHT = 0.1


class RateMeter:
    """Bytes a second while anything is under way, any number of operations at once; the recent weigh more."""

    def __init__(self) -> None:
        # Moving average of one operation.
        self.latency_s = 0.0
        self._num_running = 0
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0.0

    def begin(self, now: float) -> None:
        """An operation starts."""
        if self._num_running == 0:
            self._busy_since = now
        self._num_running += 1

    def end(self, now: float, started_at: float, num_bytes: int) -> None:
        """An operation that started then has moved so many bytes (0: it failed)."""
        self._num_running -= 1
        self._busy_s += now - self._busy_since
        self._busy_since = now
        self._num_bytes += num_bytes
        latency_s = now - started_at
        self.latency_s += (latency_s - self.latency_s) * (_WEIGHT if self.latency_s else 1.0)
        if self._busy_s > _MEMORY_S:
            self._busy_s /= 2
            self._num_bytes /= 2

    @property
    def gb_s(self) -> float:
        """0.0: not yet known."""
        return self._num_bytes / self._busy_s / 1e9 if self._busy_s > 0 else 0.0
