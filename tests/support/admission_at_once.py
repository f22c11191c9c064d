"""An admission that lets no request wait, for tests of what happens after it."""

from __future__ import annotations

from typing import Protocol

from cluster.admission.flow import Flow
from cluster.admission.queued_bytes import QueuedBytes
from cluster.admission.queued_request import QueuedRequest, Released
from router.messages import Decision, RouteRequest


class Router(Protocol):
    """Places requests."""

    def route(self, request: RouteRequest, *, prefers_capacity: bool = False) -> Decision: ...


class RetriesAtOnce:
    """Releases each retry where its router puts it."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def wait_for_capacity(self, queued: QueuedRequest, request: RouteRequest) -> None:
        self._release(queued, self._router.route(request, prefers_capacity=True))

    def send(self, queued: QueuedRequest, request: RouteRequest) -> None:
        self._release(queued, self._router.route(request))

    def _release(self, queued: QueuedRequest, decision: Decision) -> None:
        assert queued.report is not None
        queued.report(Released(decision))


class AdmissionAtOnce:
    """Lets no request wait for a turn."""

    def __init__(self, router: Router) -> None:
        self.bytes = QueuedBytes(1e9)
        self.retries = RetriesAtOnce(router)

    def place(self, queued: QueuedRequest, request: RouteRequest) -> None:
        raise AssertionError("requests go at once here")

    def wait(self, queued: QueuedRequest) -> None:
        raise AssertionError("requests go at once here")


def request_at_once(request_id: str, now: float) -> QueuedRequest:
    """Return a request that waits for no turn."""
    return QueuedRequest(request_id, Flow("", "standard"), now, goes_at_once=True)
