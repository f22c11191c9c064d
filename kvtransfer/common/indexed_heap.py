"""A heap whose items can be removed, or get another number, at any time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

# Entries of removed items that may be left in addition to the number of items.
_MOST_STALE = 16

T = TypeVar("T")


class IndexedHeap(Generic[T]):
    """Items by a number each: the least first, and of equal ones whichever came first. Each may be removed or
    get another number at any time, and what is removed is forgotten."""

    def __init__(self) -> None:
        # The entry of an item is the one with its ticket; the others are of items that were removed.
        self._entries: list[tuple[float, int, T]] = []
        self._tickets: dict[T, int] = {}
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[T]:
        """Yield the items in the order in which they were added."""
        return iter(self._tickets)

    def __contains__(self, item: object) -> bool:
        return item in self._tickets

    def put(self, item: T, number: float) -> None:
        """Add the item, or give it another number."""
        self._num_put += 1
        self._tickets[item] = self._num_put
        heapq.heappush(self._entries, (number, self._num_put, item))
        self._compact()

    def remove(self, item: T) -> bool:
        """Remove the item; False: it is not there."""
        if self._tickets.pop(item, None) is None:
            return False
        self._compact()
        return True

    def first(self) -> tuple[float, T] | None:
        """Return the least number and its item; None: there is none."""
        entries, tickets = self._entries, self._tickets
        while entries:
            number, ticket, item = entries[0]
            if tickets.get(item) == ticket:
                return number, item
            heapq.heappop(entries)
        return None

    def check(self) -> None:
        """Assert that every item has an entry, and that there are few others."""
        current = [item for _, ticket, item in self._entries if self._tickets.get(item) == ticket]
        assert len(current) == len(self._tickets)
        assert len(self._entries) <= 2 * len(self._tickets) + _MOST_STALE

    def _compact(self) -> None:
        if len(self._entries) > 2 * len(self._tickets) + _MOST_STALE:
            self._entries = [it for it in self._entries if self._tickets.get(it[2]) == it[1]]
            heapq.heapify(self._entries)
