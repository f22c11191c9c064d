"""What a gateway does before it refuses requests: one rung after the other, by how long new requests would
wait. Time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from cluster.admission.fair_queue import Flow


class Rung(IntEnum):
    """Each rung includes those before it."""

    NORMAL = 0
    # Requests of the class `batch` are held, and those that run are paused.
    BATCH_PAUSED = 1
    # `max_tokens` is cut where the class allows it.
    TOKENS_CAPPED = 2
    # New requests of the class `batch`, and of tenants whose weight is below 1, are refused.
    LOW_WEIGHT_SHED = 3
    # Who is predicted to miss its objective is refused, as on every rung: now that is so for most.
    REFUSING = 4


# The pressure from which on each rung is taken: the wait of a new request, in parts of its objective.
THRESHOLDS = {
    Rung.BATCH_PAUSED: 0.4,
    Rung.TOKENS_CAPPED: 0.6,
    Rung.LOW_WEIGHT_SHED: 0.8,
    Rung.REFUSING: 1.0,
}
# A rung is left when the pressure has been below this part of its threshold for so long.
RELEASE_PART = 0.8
RELEASE_S = 5.0


# How often the pressure is measured, at most.
_PERIOD_S = 0.1
# How long a flow counts in it after its last request, and how many do.
_ASKING_S = 5.0
_MAX_ASKING = 1000


class Ladder:
    """The rung of a gateway. It climbs at once, as far as the pressure goes, and descends rung by rung.

    rung n --pressure >= threshold of a higher rung--> that rung
    rung n --pressure < RELEASE_PART x its threshold, for RELEASE_S--> rung n - 1
    """

    def __init__(self, on_change: Callable[[Rung, Rung, float], None]) -> None:
        """`on_change` hears of the rung before, the rung now and the pressure."""
        self.rung = Rung.NORMAL
        self.pressure = 0.0
        self._on_change = on_change
        self._calm_since: float | None = None

    def update(self, pressure: float, now: float) -> None:
        """Take the pressure of this moment."""
        self.pressure = pressure
        higher = [rung for rung, threshold in THRESHOLDS.items() if pressure >= threshold]
        if higher and higher[-1] > self.rung:
            self._calm_since = None
            self._move(higher[-1])
        elif self.rung is Rung.NORMAL or pressure >= RELEASE_PART * THRESHOLDS[self.rung]:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now >= self._calm_since + RELEASE_S:
            self._calm_since = now
            self._move(Rung(self.rung - 1))

    def _move(self, rung: Rung) -> None:
        before, self.rung = self.rung, rung
        self._on_change(before, rung, self.pressure)


class _Asking(NamedTuple):
    """What the latest request of a flow would have waited, in parts of what it may."""

    at: float
    weight: float
    part: float


class Pressure:
    """What moves a ladder: the waits of new requests, in parts of what they may wait, as the mean of the
    flows that have asked lately, by their weights. One that waits for its own many requests counts as one."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        # The latest last.
        self._asking: dict[Flow, _Asking] = {}
        self._measured_at = float("-inf")

    def note(self, flow: Flow, weight: float, part: float, now: float) -> None:
        """Note what part of its time a request of the flow would wait."""
        self._asking.pop(flow, None)
        self._asking[flow] = _Asking(now, weight, part)
        if len(self._asking) > _MAX_ASKING:
            del self._asking[next(iter(self._asking))]
        self.measure(now)

    def measure(self, now: float) -> None:
        """Move the ladder, unless that was done a moment ago."""
        if now < self._measured_at + _PERIOD_S:
            return
        self._measured_at = now
        while self._asking and next(iter(self._asking.values())).at < now - _ASKING_S:
            del self._asking[next(iter(self._asking))]
        weights = sum(it.weight for it in self._asking.values())
        pressure = sum(it.weight * it.part for it in self._asking.values()) / weights if weights else 0.0
        self._ladder.update(pressure, now)
