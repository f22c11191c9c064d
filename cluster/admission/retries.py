"""Requests that a replica has refused, and that wait for one that has capacity; and when clients may come
back that the gateway has refused. Time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cluster.admission.queued_request import QueuedRequest
from kvtransfer.common.moving_average import moving_average

# Bounds of the time between the ends of two requests, and the weight of the newest in the average.
_LEAST_GAP_S = 1e-3
_MOST_GAP_S = 10.0
_GAP_WEIGHT = 0.1


class CapacityView(Protocol):
    """The part of `router.service.RouterService` that a queue of retries needs."""

    def has_capacity(self, request_id: str) -> bool:
        """Whether the replicas of a placed request can take it now."""


class RetryQueue:
    """The retries of one gateway, in the order of the refusals. Each goes when the pair that was chosen for
    it can take it, before any request that was never sent. Not thread-safe."""

    def __init__(
        self,
        router: CapacityView,
        release: Callable[[QueuedRequest], None],
        reroute: Callable[[QueuedRequest], None],
    ) -> None:
        """`release` submits a request, and `reroute` places it once more: it may be put here again."""
        self._router = router
        self._release = release
        self._reroute = reroute
        self._waiting: dict[str, QueuedRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, queued: QueuedRequest) -> None:
        """Release the request when its pair has capacity, which may be now."""
        assert queued.request_id not in self._waiting
        self._waiting[queued.request_id] = queued
        self.pump()

    def drop(self, queued: QueuedRequest) -> bool:
        """Forget a request that ended, or waits no more. Returns whether it waited."""
        is_waiting = self._waiting.get(queued.request_id) is queued
        if is_waiting:
            del self._waiting[queued.request_id]
        return is_waiting

    def pump(self) -> None:
        """Release the retries that can be taken now."""
        for queued in list(self._waiting.values()):
            if self._router.has_capacity(queued.request_id) and self.drop(queued):
                self._release(queued)

    def leave(self, replica_id: str) -> None:
        """Place once more the retries that wait for a replica that is gone, or should be avoided."""
        for queued in list(self._waiting.values()):
            if replica_id in (queued.decision.prefill, queued.decision.decode) and self.drop(queued):
                self._reroute(queued)


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
