"""Requests that a replica has refused, and that wait for one that has capacity; and when clients may come
back that the gateway has refused. Time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.common.health import moving_average
from router.messages import Decision

# A request goes to a replica without capacity after so long: what is known of its load may be wrong.
CAPACITY_WAIT_S = 2.0
# Between the ends of two requests: the bounds, and the weight of the newest in the average.
_LEAST_GAP_S = 1e-3
_MOST_GAP_S = 10.0
_GAP_WEIGHT = 0.1


class CapacityView(Protocol):
    """What a queue of retries needs of `router.service.RouterService`."""

    def has_capacity(self, request_id: str) -> bool:
        """Whether the replicas of a placed request can take it now."""

    def on_submitted(self, request_id: str) -> None:
        """Note that a request that was held has been sent to its replicas."""


@dataclass(slots=True, eq=False)
class Retry:
    """A request that was placed again, `release`, which submits it, and `reroute`, which places it once
    more."""

    decision: Decision
    release: Callable[[Retry], None]
    reroute: Callable[[Retry], None]


class RetryQueue:
    """The retries of one gateway, in the order of the refusals. Each goes when the pair that was chosen for
    it can take it, before whatever was never sent. Not thread-safe."""

    def __init__(self, router: CapacityView) -> None:
        self._router = router
        self._waiting: dict[str, Retry] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, retry: Retry) -> None:
        """Release the request when its pair has capacity, which may be now."""
        assert retry.decision.request_id not in self._waiting
        self._waiting[retry.decision.request_id] = retry
        self.pump()

    def drop(self, retry: Retry) -> bool:
        """Forget a request that ended, or waits no more. Returns whether it waited."""
        is_waiting = self._waiting.get(retry.decision.request_id) is retry
        if is_waiting:
            del self._waiting[retry.decision.request_id]
        return is_waiting

    def pump(self) -> None:
        """Release what can be taken now."""
        for retry in list(self._waiting.values()):
            if self._router.has_capacity(retry.decision.request_id) and self.drop(retry):
                self._router.on_submitted(retry.decision.request_id)
                retry.release(retry)

    def leave(self, replica_id: str) -> None:
        """Place once more what waits for a replica that is gone, or should be avoided."""
        for retry in list(self._waiting.values()):
            if replica_id in (retry.decision.prefill, retry.decision.decode) and self.drop(retry):
                retry.reroute(retry)


class EndRate:
    """How often a request ends, which makes a place for another."""

    def __init__(self, now: float) -> None:
        self._last_at = now
        # Between two ends; 0: not known.
        self._gap_s = 0.0

    def add(self, now: float) -> None:
        """Note that a request ended."""
        self._gap_s = moving_average(self._gap_s, max(now - self._last_at, _LEAST_GAP_S), _GAP_WEIGHT)
        self._last_at = now

    def next_s(self, now: float) -> float:
        """Return in how many seconds the next request is likely to end: requests that have run for long may
        run for as long again."""
        return min(max(self._gap_s, now - self._last_at), _MOST_GAP_S)
