"""Keep the pushes of a writing rank: which are queued, running or stopped, and when `StopPush` is answered.

The other half of the fence is the target rank's `Gate` (`kvtransfer.protocol.gate`).

    submit -> queued -> start -> running -> end        reports PushDone or PushFailed
               | ^                |   |
            stop +------ park ----+  stop: asked between batches    -> PushFailed, then PushStopped

The order handler and the writing threads call the fence. A caller of `end` or `park` has made sure that
nothing of the push is under way any more. Reports are made under its lock, so that nothing of a landing
follows its `PushStopped`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtransfer.protocol.gate import RecentIds
from kvtransfer.transfer_orders import PushOrder
from kvtransfer.transfer_reports import PushDone, PushFailed, PushStopped, TransferReport

_LANDING_STOPPED = "its landing was stopped"


class PushFence:
    """Tracks every push of one rank; push ids are unique within it."""

    def __init__(self, report: Callable[[TransferReport], None]) -> None:
        self._report = report
        self._lock = threading.RLock()
        self._connections: set[bytes] = set()
        self._queued: dict[int, PushOrder] = {}
        self._running: dict[int, PushOrder] = {}
        self._stopped = RecentIds()
        self._unanswered: set[bytes] = set()

    def add_connection(self, connection_id: bytes) -> None:
        """Accept pushes on this connection from now on."""
        with self._lock:
            self._connections.add(connection_id)

    def remove_connection(self, connection_id: bytes, reason: str) -> None:
        """Fail the pushes that are queued on the connection, and everything that is submitted to it later."""
        with self._lock:
            self._connections.discard(connection_id)
            for order in [each for each in self._queued.values() if each.connection_id == connection_id]:
                self._fail_queued(order, reason)

    def submit(self, order: PushOrder) -> bool:
        """Queue the order and return True, or report it as failed and return False."""
        with self._lock:
            return self._queue(order)

    def start(self, order: PushOrder) -> bool:
        """Take the order into the writing thread; False when it was failed while it waited."""
        with self._lock:
            if self._queued.pop(order.push_id, None) is None:
                return False
            self._running[order.push_id] = order
            return True

    def park(self, order: PushOrder) -> bool:
        """Queue an order again that the writing thread leaves for now, so that a stop need not wait for it.
        False when the order was stopped before, and was reported as failed."""
        with self._lock:
            del self._running[order.push_id]
            is_queued = self._queue(order)
            self._answer(order.landing_id)
            return is_queued

    def end(self, order: PushOrder, result: PushDone | PushFailed) -> None:
        """Note that the writing thread is done with the order: report its result, and answer a stop that
        waited."""
        with self._lock:
            del self._running[order.push_id]
            self._report(result)
            self._answer(order.landing_id)

    def stop(self, landing_id: bytes) -> None:
        """Start nothing more of the landing; `PushStopped` follows when nothing of it runs."""
        with self._lock:
            self._stopped.add(landing_id)
            for order in [each for each in self._queued.values() if each.landing_id == landing_id]:
                self._fail_queued(order, _LANDING_STOPPED)
            self._unanswered.add(landing_id)
            self._answer(landing_id)

    def is_stopped(self, landing_id: bytes) -> bool:
        with self._lock:
            return landing_id in self._stopped

    def _queue(self, order: PushOrder) -> bool:
        if order.landing_id in self._stopped:
            reason = _LANDING_STOPPED
        elif order.connection_id not in self._connections:
            reason = "its connection is closed"
        else:
            self._queued[order.push_id] = order
            return True
        self._report(PushFailed(order.push_id, order.landing_id, reason))
        return False

    def _answer(self, landing_id: bytes) -> None:
        """Report `PushStopped` when a stop waits for it and nothing of the landing runs."""
        if landing_id in self._unanswered and not self._is_running(landing_id):
            self._unanswered.discard(landing_id)
            self._report(PushStopped(landing_id))

    def _fail_queued(self, order: PushOrder, reason: str) -> None:
        del self._queued[order.push_id]
        self._report(PushFailed(order.push_id, order.landing_id, reason))

    def _is_running(self, landing_id: bytes) -> bool:
        return any(order.landing_id == landing_id for order in self._running.values())
