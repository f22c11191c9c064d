"""What a gateway does before it refuses requests: one rung after the other, by how long new requests would
wait. Time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from cluster.admission.flow import Flow
from kvtransfer.common.moving_average import kept_share


class Rung(IntEnum):
    """Each rung includes those before it."""

    NORMAL = 0
    # Requests of the class `batch` stay queued, and those that run are paused.
    BATCH_PAUSED = 1
    # `max_tokens` is cut where the class allows it.
    TOKENS_CAPPED = 2
    # New requests of the class `batch`, and of tenants whose weight is below 1, are refused.
    LOW_WEIGHT_SHED = 3
    # Requests that are predicted to miss their objective are refused, as on every rung: on this one most are.
    REFUSING = 4


# The pressure from which on each rung is taken: the wait of a new request, in parts of its objective.
THRESHOLDS = {
    Rung.BATCH_PAUSED: 0.4,
    Rung.TOKENS_CAPPED: 0.6,
    Rung.LOW_WEIGHT_SHED: 0.8,
    Rung.REFUSING: 1.0,
}
# A rung is left when the pressure has been below this part of its threshold for this time, or when hardly
# anything has waited for this shorter time.
RELEASE_PART = 0.8
RELEASE_S = 5.0
IDLE_PRESSURE = 0.1
IDLE_RELEASE_S = 1.0
# A rung that is needed again within this time was left too early: the times until it is left are then twice
# as long, up to this factor, until it was left for good.
AGAIN_S = 60.0
MOST_PATIENCE = 8


# How often the pressure is measured, at most, and over what time it is averaged: single requests wait for
# very different times.
_PERIOD_S = 0.1
SMOOTHED_S = 1.5
# The time for which a flow counts in the average after its last request, and the number of flows that do.
_ASKING_S = 5.0
_MAX_ASKING = 1000


class Ladder:
    """The rung of a gateway. It climbs at once, as far as the pressure goes, and descends rung by rung.

    rung n --pressure >= threshold of a higher rung--> that rung
    rung n --pressure < RELEASE_PART x its threshold, for RELEASE_S x patience--> rung n - 1
    rung n --pressure < IDLE_PRESSURE, for IDLE_RELEASE_S x patience--> rung n - 1
    """

    def __init__(self, on_change: Callable[[Rung, Rung, float], None]) -> None:
        """`on_change` hears of the rung before, the rung now and the pressure."""
        self.rung = Rung.NORMAL
        self.pressure = 0.0
        self._on_change = on_change
        self._calm_since: float | None = None
        self._idle_since: float | None = None
        self._left_at = dict.fromkeys(Rung, float("-inf"))
        self._patience = dict.fromkeys(Rung, 1)

    def update(self, pressure: float, now: float) -> None:
        """Take the pressure of this moment."""
        self.pressure = pressure
        higher = max((rung for rung, least in THRESHOLDS.items() if pressure >= least), default=Rung.NORMAL)
        if higher > self.rung:
            self._calm_since = self._idle_since = None
            self._climb(higher, now)
            return
        is_calm = self.rung is not Rung.NORMAL and pressure < RELEASE_PART * THRESHOLDS[self.rung]
        self._calm_since = _since(self._calm_since, now, is_true=is_calm)
        self._idle_since = _since(self._idle_since, now, is_true=is_calm and pressure < IDLE_PRESSURE)
        patience = self._patience[self.rung]
        if _is_past(self._calm_since, RELEASE_S * patience, now) or _is_past(
            self._idle_since, IDLE_RELEASE_S * patience, now
        ):
            self._calm_since = now
            self._idle_since = _since(None, now, is_true=pressure < IDLE_PRESSURE)
            self._left_at[self.rung] = now
            self._move(Rung(self.rung - 1))

    def earliest_exit_s(self, rung: Rung, now: float) -> float:
        """Return in how many seconds the rung can have been left at the earliest; 0: it was."""
        is_idle = self.pressure < IDLE_PRESSURE
        since, release_s = (self._idle_since, IDLE_RELEASE_S) if is_idle else (self._calm_since, RELEASE_S)
        passed_s = 0.0 if since is None else now - since
        each_s = [release_s * self._patience[it] for it in Rung if rung <= it <= self.rung]
        return max(0.0, sum(each_s) - passed_s)

    def _climb(self, rung: Rung, now: float) -> None:
        for each in Rung:
            if self.rung < each <= rung:
                is_again = now < self._left_at[each] + AGAIN_S
                self._patience[each] = min(2 * self._patience[each], MOST_PATIENCE) if is_again else 1
        self._move(rung)

    def _move(self, rung: Rung) -> None:
        before, self.rung = self.rung, rung
        self._on_change(before, rung, self.pressure)


def _since(since: float | None, now: float, *, is_true: bool) -> float | None:
    """Return since when something is true that was, or was not, true until now."""
    if not is_true:
        return None
    return now if since is None else since


def _is_past(since: float | None, duration_s: float, now: float) -> bool:
    return since is not None and now >= since + duration_s


class _Asking(NamedTuple):
    """The wait that the latest request of a flow would have had, in parts of its longest wait."""

    at: float
    weight: float
    part: float


class Pressure:
    """The force that moves a ladder: the waits of new requests, in parts of their longest waits, as the mean
    of the recent flows, by their weights, averaged over time. A flow that waits for its own many requests
    counts as one."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        # The latest last.
        self._asking: dict[Flow, _Asking] = {}
        self._measured_at = float("-inf")
        self._smoothed = 0.0

    def note(self, flow: Flow, weight: float, part: float, now: float) -> None:
        """Note the part of its time that a request of the flow would wait."""
        self._asking.pop(flow, None)
        self._asking[flow] = _Asking(now, weight, part)
        if len(self._asking) > _MAX_ASKING:
            del self._asking[next(iter(self._asking))]
        self.measure(now)

    def measure(self, now: float) -> None:
        """Move the ladder, unless that was done a moment ago."""
        if now < self._measured_at + _PERIOD_S:
            return
        passed_s, self._measured_at = now - self._measured_at, now
        while self._asking and next(iter(self._asking.values())).at < now - _ASKING_S:
            del self._asking[next(iter(self._asking))]
        weights = sum(it.weight for it in self._asking.values())
        pressure = sum(it.weight * it.part for it in self._asking.values()) / weights if weights else 0.0
        self._smoothed += (1 - kept_share(passed_s, SMOOTHED_S)) * (pressure - self._smoothed)
        self._ladder.update(self._smoothed, now)
