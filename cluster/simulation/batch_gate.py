"""Batching as engines did it before they admitted requests between steps: baselines, which exist only here.

A gate stands before a replica. `static`: requests wait until a batch is full or its first request has
waited for `WINDOW_S`, and until the whole batch before has ended. `dynamic`: whatever waits is a batch as
soon as the one before has ended. `continuous` is the scheduler's own way, without a gate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from cluster.simulation.virtual_time import EventQueue
from workers.messages.link import RequestKey

Batching = Literal["static", "dynamic", "continuous"]
# The longest that the first request of a static batch waits for others.
WINDOW_S = 1.0


class BatchGate:
    """Holds the submissions of one replica back until its batch begins."""

    def __init__(self, batching: Batching, size: int, events: EventQueue) -> None:
        self._batching = batching
        self._size = size
        self._events = events
        self._waiting: deque[tuple[RequestKey, Callable[[], None]]] = deque()
        self._batch: set[RequestKey] = set()
        self._opens_at = 0.0

    def put(self, key: RequestKey, begin: Callable[[], None]) -> None:
        """Let a request wait; `begin` submits it."""
        self._waiting.append((key, begin))
        if len(self._waiting) == 1:
            self._opens_at = self._events.clock.now() + WINDOW_S
            if self._batching == "static":
                self._events.at(self._opens_at, self.look)
        self.look()

    def drop(self, key: RequestKey) -> None:
        """Forget a request that is cancelled while it waits."""
        self._waiting = deque(it for it in self._waiting if it[0] != key)

    def review(self, is_here: Callable[[RequestKey], bool]) -> None:
        """Forget the requests of the batch that have left the replica."""
        if self._batch:
            self._batch = {key for key in self._batch if is_here(key)}
            self.look()

    def look(self) -> None:
        """Begin the next batch, if it may."""
        if self._batch or not self._waiting:
            return
        is_full = len(self._waiting) >= self._size
        if self._batching == "static" and not is_full and self._events.clock.now() < self._opens_at:
            return
        batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
        self._batch = {key for key, _ in batch}
        self._opens_at = self._events.clock.now() + WINDOW_S
        if self._waiting and self._batching == "static":
            self._events.at(self._opens_at, self.look)
        for _, begin in batch:
            begin()
