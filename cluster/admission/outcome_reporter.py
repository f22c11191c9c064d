"""Report the outcomes of the requests that wait to the tasks that run them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from cluster.admission.queued_bytes import QueuedBytes
from cluster.admission.queued_request import QueuedRequest, Refused, Released, Unplaced
from cluster.errors import InternalError, failures_logged
from router.errors import NoReplicaError
from router.messages import Decision

_log = logging.getLogger(__name__)


class OutcomeReporter:
    """Reports outcomes. The bytes of a request count until it is released."""

    def __init__(self, queued_bytes: QueuedBytes) -> None:
        self._bytes = queued_bytes

    def released(self, queued: QueuedRequest, decision: Decision) -> None:
        """Let the task of a request submit it to the replicas of the decision."""
        assert queued.report is not None
        self._bytes.forget(queued)
        queued.report(Released(decision))

    def unplaced(self, queued: QueuedRequest, error: NoReplicaError) -> None:
        """Let the task of a request, if it has one already, look again for replicas."""
        if queued.report is not None:
            queued.report(Unplaced(str(error), error.retry_after_s))

    @contextlib.contextmanager
    def reporting_failure(self, queued: QueuedRequest) -> Iterator[None]:
        """Report a request for which no place is found within; whatever else is raised ends it alone."""
        is_placed = False
        with failures_logged(_log, f"request {queued.request_id} could not be placed again"):
            try:
                yield
            except NoReplicaError as error:
                self.unplaced(queued, error)
            is_placed = True
        if not is_placed and queued.report is not None:
            queued.report(Refused(InternalError()))
