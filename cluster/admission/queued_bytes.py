"""Bound the bytes of the requests of a gateway that are not submitted yet."""

from __future__ import annotations

from cluster.admission.queued_request import QueuedRequest


class QueuedBytes:
    """The bytes of all requests of a gateway that are not submitted yet, or are placed again: those that are
    prepared, and those that wait for their turn, for capacity or for any replica."""

    def __init__(self, max_bytes: float) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._counted: set[QueuedRequest] = set()

    def count(self, queued: QueuedRequest, num_bytes: int) -> None:
        """Count the request with this many bytes from now on, until `forget`."""
        self.forget(queued)
        queued.num_bytes = num_bytes
        self.num_bytes += num_bytes
        self._counted.add(queued)

    def forget(self, queued: QueuedRequest) -> None:
        """Stop counting a request; again: do nothing."""
        if queued in self._counted:
            self._counted.remove(queued)
            self.num_bytes -= queued.num_bytes

    def excess_bytes(self, num_more: int) -> float:
        """Return the bytes beyond the limit with this many more."""
        return self.num_bytes + num_more - self.max_bytes
