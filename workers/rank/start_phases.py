"""Measure the phases of a rank's start, one after another."""

from __future__ import annotations

from kvtransfer.common.clock import Clock

IMPORTING = "importing"


class StartPhases:
    """Notes when each phase begins; the first is "importing"."""

    def __init__(self, clock: Clock, began_at: float) -> None:
        """`began_at` is when the process began, by the clock."""
        self._clock = clock
        self._name, self._since = IMPORTING, began_at
        self._phase_to_s: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """End the current phase. What follows a comma in the name of a phase is progress within it."""
        now, name = self._clock.now(), phase.partition(",")[0]
        if name != self._name:
            self._phase_to_s[self._name] = self._phase_to_s.get(self._name, 0.0) + now - self._since
            self._name, self._since = name, now

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase that has ended, in the order in which they began first."""
        return dict(self._phase_to_s)
