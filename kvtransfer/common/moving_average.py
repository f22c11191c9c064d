"""Moving averages: of any values, and of the bytes per second that operations really moved."""

from __future__ import annotations

import math

# Busy seconds after which what was counted weighs half.
_MEMORY_S = 1.0
_LATENCY_WEIGHT = 0.1


def kept_share(elapsed_s: float, memory_s: float) -> float:
    """Return the share of its weight that a value keeps after `elapsed_s`; after `memory_s` it is 1/e."""
    return math.exp(-elapsed_s / memory_s)


def moving_average(average: float, value: float, weight: float) -> float:
    """Return `average` with a new value of this weight; `value` itself while `average` is 0.0 (not known)."""
    return average + (value - average) * weight if average else value


class RateMeter:
    """Bytes per second while any operation runs, however many run at once; recent operations weigh more."""

    def __init__(self) -> None:
        # Moving average of one operation.
        self.latency_s = 0.0
        self._num_running = 0
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0.0

    def begin(self, now: float) -> None:
        """Count the start of an operation."""
        if self._num_running == 0:
            self._busy_since = now
        self._num_running += 1

    def end(self, now: float, started_at: float, num_bytes: int) -> None:
        """Count the end of an operation that started at `started_at` and moved `num_bytes` (0: it failed)."""
        self._num_running -= 1
        self._busy_s += now - self._busy_since
        self._busy_since = now
        self._num_bytes += num_bytes
        self.latency_s = moving_average(self.latency_s, now - started_at, _LATENCY_WEIGHT)
        if self._busy_s > _MEMORY_S:
            self._busy_s /= 2
            self._num_bytes /= 2

    @property
    def gb_s(self) -> float:
        """1e9 bytes per second; 0.0: not yet known."""
        return self._num_bytes / self._busy_s / 1e9 if self._busy_s > 0 else 0.0
