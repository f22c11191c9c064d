"""Place the requests again that a replica has refused, and send them when their replicas have capacity.

    replica refuses --> wait_for_capacity: route --> RetryQueue --capacity, or a replica that leaves-->
                              ^                          |  after `CAPACITY_WAIT_S`    |             |
                              |                          v                             v             |
                              |                        send: route ---------------> Released         |
                              +----------------------------------------------------------------------+

Retries are not judged again: they were accepted already.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.admission.outcome_reporter import OutcomeReporter
from cluster.admission.queued_request import QueuedRequest
from cluster.admission.retry_queue import RetryQueue
from kvtransfer.common.clock import Clock
from router.messages import RouteRequest
from router.service import RouterService

# A retry goes to a replica without capacity after this time: its known load may be wrong.
CAPACITY_WAIT_S = 2.0


class Retries:
    """Routes the retries of one gateway, and reports where each of them goes. Not thread-safe."""

    def __init__(
        self,
        router: RouterService,
        clock: Clock,
        call_at: Callable[[float, Callable[[], None]], object],
        reporter: OutcomeReporter,
    ) -> None:
        """`call_at` calls at a time of the clock, in a later turn of the event loop."""
        self._router = router
        self._clock = clock
        self._call_at = call_at
        self._reporter = reporter
        self.queue = RetryQueue(router, self._release, self._reroute)

    def wait_for_capacity(self, queued: QueuedRequest, request: RouteRequest) -> None:
        """Place a request again that a replica has refused, and report one outcome: `Released` when the pair
        can take it, or after `CAPACITY_WAIT_S` wherever it costs least; or `Unplaced`. Raises
        `NoReplicaError` where there is no place at all."""
        queued.route_request = request
        queued.decision = self._router.route(request, is_queued=True, queued_part=0.0, prefers_capacity=True)
        queued.waits_until = until = self._clock.now() + CAPACITY_WAIT_S

        def send_anyway() -> None:
            if queued.waits_until == until and self.queue.drop(queued):
                with self._reporter.reporting_failure(queued):
                    self.send(queued, queued.route_request)

        self._call_at(until, send_anyway)
        self.queue.put(queued)

    def send(self, queued: QueuedRequest, request: RouteRequest) -> None:
        """Report `Released` now, wherever the request costs least; raise `NoReplicaError` where there is no
        place: it waits neither for its turn nor for capacity."""
        self._reporter.released(queued, self._router.route(request, queued_part=0.0))

    def _release(self, queued: QueuedRequest) -> None:
        self._router.on_submitted(queued.request_id)
        self._reporter.released(queued, queued.decision)

    def _reroute(self, queued: QueuedRequest) -> None:
        """Place a retry once more, one of whose replicas is gone or avoided."""
        self._router.on_finished(queued.request_id)
        with self._reporter.reporting_failure(queued):
            self.wait_for_capacity(queued, queued.route_request)
