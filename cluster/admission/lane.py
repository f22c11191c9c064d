"""What waits in a gateway for one replica."""

from __future__ import annotations

import math

from cluster.admission.fair_queue import FairQueue

# How fast a replica takes work is remembered for about this, and before any is measured, it is assumed that
# it took as much as was predicted for so long.
_RATE_S = 10.0
_ASSUMED_S = 0.5
_LEAST_RATE = 0.01
_MOST_RATE = 4.0


class ReplicaLane:
    """What waits for one replica, and how fast that takes work: seconds of predicted work a second, measured
    while something waits that it cannot take."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        # To be computed, of what waits.
        self.num_tokens = 0
        # The replicas one of which cannot take the next request; (): none waits.
        self.waits_for: tuple[str, ...] = ()
        # Work taken, and time in which some waited for it; what is long ago counts less.
        self._taken_s = 0.0
        self._blocked_s = 0.0
        self._counted_until = 0.0

    def rate(self, now: float) -> float:
        """Return how fast the replica takes work."""
        self._count(now)
        rate = (self._taken_s + _ASSUMED_S) / (self._blocked_s + _ASSUMED_S)
        return min(max(rate, _LEAST_RATE), _MOST_RATE)

    def blocked(self, now: float, waits_for: tuple[str, ...]) -> None:
        """Note which replicas the next request waits for, from now on; (): none."""
        self._count(now)
        self.waits_for = waits_for

    def taken(self, cost_s: float, now: float) -> None:
        """Note that the replica took work."""
        self._count(now)
        if self.waits_for:
            self._taken_s += cost_s

    def _count(self, now: float) -> None:
        """Let time pass: in which the next request waits, or in which what was measured is forgotten."""
        kept = math.exp((self._counted_until - now) / _RATE_S)
        self._taken_s *= kept
        self._blocked_s *= kept
        if self.waits_for:
            self._blocked_s += _RATE_S * (1 - kept)
        self._counted_until = now
