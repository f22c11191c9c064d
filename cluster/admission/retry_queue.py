"""Queue the requests that a replica has refused until their replicas have capacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cluster.admission.queued_request import QueuedRequest


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
