"""Measure how fast the requests of a gateway end, which is when refused clients may come back."""

from __future__ import annotations

from kvtransfer.common.moving_average import moving_average

# Bounds of the time between the ends of two requests, and the weight of the newest in the average.
_LEAST_GAP_S = 1e-3
_MOST_GAP_S = 10.0
_GAP_WEIGHT = 0.1


class EndRate:
    """The rate at which requests end, each of which makes a place for another."""

    def __init__(self, now: float) -> None:
        self._last_at = now
        # The time between two ends; 0: not known.
        self._gap_s = 0.0

    def add(self, now: float) -> None:
        """Note that a request ended."""
        self._gap_s = moving_average(self._gap_s, max(now - self._last_at, _LEAST_GAP_S), _GAP_WEIGHT)
        self._last_at = now

    def next_s(self, now: float) -> float:
        """Return the seconds until the next request is likely to end: requests that have run for long may run
        for the same time again."""
        return min(max(self._gap_s, now - self._last_at), _MOST_GAP_S)
