"""The target rank's gate: which landings may be written now, by whom, and who could still write one-sided.

Called by the rank's order handler (open, close) and by the threads that serve connections (find, admit,
enter, leave). Reports are made under its lock, so that `LandingClosed` and `WriterGone` keep their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import zip_longest

from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.transfer_orders import OpenLanding
from kvtransfer.transfer_reports import LandingClosed, TransferReport, WriterGone

# A connection waits this long for the order that opens a landing: the writer may be faster than it.
EARLY_WAIT_S = 5.0


class RecentIds:
    """A set that remembers at least the last `limit` ids, and at most twice as many: what was stopped or
    closed stays so for long enough, which is seconds. With the default it is full, and takes no more memory
    (about 2 MB), after a minute or two of an ordinary load."""

    def __init__(self, limit: int = 1 << 13) -> None:
        self._limit = limit
        self._ids: set[bytes] = set()
        self._older: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._ids) + len(self._older)

    def add(self, value: bytes) -> None:
        self._older.discard(value)
        self._ids.add(value)
        if len(self._ids) >= self._limit:
            self._ids, self._older = set(), self._ids

    def discard(self, value: bytes) -> None:
        self._ids.discard(value)
        self._older.discard(value)

    def __contains__(self, value: bytes) -> bool:
        return value in self._ids or value in self._older


class OpenedLanding:
    """One open landing at this rank. Bytes are received into its blocks only between `start_receiving` and
    `end_receiving`, by any number of connections at a time; `shut` waits for them."""

    def __init__(self, writer: ReplicaIdentity, block_ids: tuple[frozenset[int], ...]) -> None:
        """`block_ids` are those of each group of layers."""
        self.lock = threading.Condition()
        self.is_open = True
        self._num_receiving = 0
        self.writer = writer
        self.block_ids = block_ids
        # The one-sided connections that may be writing it.
        self.admitted: set[bytes] = set()

    def has_blocks(self, group: int, block_ids: Iterable[int]) -> bool:
        """Whether all of these blocks of a group of layers are the landing's."""
        return group < len(self.block_ids) and self.block_ids[group].issuperset(block_ids)

    def start_receiving(self) -> bool:
        """Return whether the landing is open. If so, bytes may be put into its blocks until `end_receiving`,
        which must come without waiting for the writer."""
        with self.lock:
            self._num_receiving += self.is_open
            return self.is_open

    def end_receiving(self) -> None:
        with self.lock:
            self._num_receiving -= 1
            if not self.is_open:
                self.lock.notify_all()

    def shut(self) -> None:
        """Close the landing: nothing is put into its blocks after this."""
        with self.lock:
            self.is_open = False
            self.lock.wait_for(lambda: self._num_receiving == 0)


class Gate:
    """Tracks all landings of one rank, and its one-sided connections."""

    def __init__(self, report: Callable[[TransferReport], None]) -> None:
        self._report = report
        self._changed = threading.Condition(threading.RLock())
        self._landings: dict[bytes, OpenedLanding] = {}
        self._closed = RecentIds()
        self._connections: dict[bytes, ReplicaIdentity] = {}
        self._is_shut = False

    def open(self, order: OpenLanding) -> None:
        """Accept writes of `order.writer` into these blocks (more of them when it is open already)."""
        block_ids = tuple(map(frozenset, (order.block_ids, *order.windows)))
        with self._changed:
            landing = self._landings.get(order.landing_id)
            if landing is None:
                self._landings[order.landing_id] = OpenedLanding(order.writer, block_ids)
                self._closed.discard(order.landing_id)
            else:
                with landing.lock:
                    both = zip_longest(landing.block_ids, block_ids, fillvalue=frozenset[int]())
                    landing.block_ids = tuple(earlier | more for earlier, more in both)
            self._changed.notify_all()

    def close(self, landing_id: bytes) -> None:
        """Accept nothing more and report which one-sided connections were admitted and are still open."""
        with self._changed:
            landing = self._landings.pop(landing_id, None)
            self._closed.add(landing_id)
            self._changed.notify_all()
            connections: tuple[bytes, ...] = ()
            if landing is not None:
                landing.shut()
                connections = tuple(sorted(landing.admitted))
            self._report(LandingClosed(landing_id, connections))

    def find(self, landing_id: bytes, writer: ReplicaIdentity) -> OpenedLanding | None:
        """Return the open landing, after waiting for the order that opens it; None when it is closed or
        another writer's."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_known(landing_id), EARLY_WAIT_S)
            landing = self._landings.get(landing_id)
            return landing if landing is not None and landing.writer == writer else None

    def admit(self, landing_id: bytes, connection: bytes) -> bool:
        """Let a one-sided connection write the landing from now until the connection ends."""
        landing = self.find(landing_id, self._connections[connection])
        with self._changed:
            if landing is None or not landing.is_open:
                return False
            landing.admitted.add(connection)
            return True

    def enter(self, writer: ReplicaIdentity) -> bytes:
        """Name a one-sided connection; call it before the writer can reach the memory."""
        connection = draw_id()
        with self._changed:
            self._connections[connection] = writer
        return connection

    def leave(self, connection: bytes) -> None:
        """Note that the connection's other end is closed: it can write no more."""
        with self._changed:
            writer = self._connections.pop(connection)
            for landing in self._landings.values():
                landing.admitted.discard(connection)
            self._report(WriterGone(writer, connection))

    def shut(self) -> None:
        """End every wait for a landing: the rank is closing."""
        with self._changed:
            self._is_shut = True
            self._changed.notify_all()

    def _is_known(self, landing_id: bytes) -> bool:
        return landing_id in self._landings or landing_id in self._closed or self._is_shut
