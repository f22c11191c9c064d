"""A gate for the writers of segments: many at once, or none while files are erased."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class WriteGate:
    """Counts the writers that are inside, and keeps others out while it is closed. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_inside = 0
        self._is_closed = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write inside the gate; wait first while it is closed."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_closed)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_inside -= 1
                self._condition.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keep writers out, and wait for those inside. One at a time."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_closed)
            self._is_closed = True
            self._condition.wait_for(lambda: not self._num_inside)
        try:
            yield
        finally:
            with self._condition:
                self._is_closed = False
                self._condition.notify_all()
