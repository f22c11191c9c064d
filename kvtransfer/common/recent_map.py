"""A map that keeps the latest entries: memory that is bounded whatever comes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentMap(OrderedDict[K, V]):
    """Keeps at most `limit` entries, the newest last. Use `put` and `use` to write; reading is a dict's."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def put(self, key: K, value: V) -> tuple[K, V] | None:
        """Set the entry, which is the newest then. Returns the oldest one, if that had to go."""
        self[key] = value
        self.move_to_end(key)
        return self.popitem(last=False) if len(self) > self._limit else None

    def use(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of the key, made where there is none; the entry is the newest then."""
        if key in self:
            self.move_to_end(key)
            return self[key]
        value = make()
        self.put(key, value)
        return value
