"""Bound the bytes of the requests of a gateway that are not submitted yet."""

from __future__ import annotations


class QueuedBytes:
    """The bytes of all requests of a gateway that are not submitted yet, or are placed anew: those that are
    prepared, and those that wait for their turn, for capacity or for any replica."""

    def __init__(self, max_bytes: float) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> ByteHold:
        """Count a request that has arrived."""
        return ByteHold(self, num_bytes)

    def excess_bytes(self, num_more: int) -> float:
        """Return by how much it is too much with so many more."""
        return self.num_bytes + num_more - self.max_bytes


class ByteHold:
    """The bytes of one request. They count from the beginning; leaving a `with` block releases them."""

    __slots__ = ("_is_counted", "_num_bytes", "_queued")

    def __init__(self, queued: QueuedBytes, num_bytes: int) -> None:
        self._queued = queued
        self._num_bytes = num_bytes
        self._is_counted = False
        self.renew()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Stop counting the request, which waits no more; again: do nothing."""
        if self._is_counted:
            self._is_counted = False
            self._queued.num_bytes -= self._num_bytes

    def renew(self) -> None:
        """Count the request again, which waits once more."""
        if not self._is_counted:
            self._is_counted = True
            self._queued.num_bytes += self._num_bytes
