"""A map of keys in slices: it grows, and can be read, a slice at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SlicedMap(Generic[K, V]):
    """Maps keys, each of which has its place in one of the slices as long as it is there.

    A dictionary of a million keys takes 100 ms to grow, and cannot be read in parts while it changes. Slices
    are dictionaries of their own. Loops over many keys take them from `slices`, by `hash(key)` modulo their
    number. That should be a prime: dictionaries find their places by the last bits of hashes, which all keys
    of a slice would share if the number were a power of two.
    """

    __slots__ = ("slices",)

    def __init__(self, num_slices: int) -> None:
        self.slices: tuple[dict[K, V], ...] = tuple({} for _ in range(num_slices))

    def __len__(self) -> int:
        return sum(map(len, self.slices))

    def __bool__(self) -> bool:
        return any(self.slices)

    def __iter__(self) -> Iterator[K]:
        for each in self.slices:
            yield from each

    def __contains__(self, key: object) -> bool:
        return key in self.slices[hash(key) % len(self.slices)]

    def __getitem__(self, key: K) -> V:
        return self.slices[hash(key) % len(self.slices)][key]

    def __setitem__(self, key: K, value: V) -> None:
        self.slices[hash(key) % len(self.slices)][key] = value

    def get(self, key: K) -> V | None:
        """Return the value of a key; None: it is not there."""
        return self.slices[hash(key) % len(self.slices)].get(key)

    def pop(self, key: K) -> V | None:
        """Remove a key and return its value; None: it was not there."""
        return self.slices[hash(key) % len(self.slices)].pop(key, None)

    def set_all(self, keys: Iterable[K], value: V) -> None:
        """Give all of these keys one value."""
        slices, num_slices = self.slices, len(self.slices)
        for key in keys:
            slices[hash(key) % num_slices][key] = value

    def missing(self, keys: Iterable[K]) -> list[K]:
        """Return those of these keys that are not there."""
        slices, num_slices = self.slices, len(self.slices)
        return [key for key in keys if key not in slices[hash(key) % num_slices]]

    def discard_all(self, keys: Iterable[K]) -> list[K]:
        """Remove those of these keys that are there, and return them."""
        slices, num_slices = self.slices, len(self.slices)
        gone: list[K] = []
        for key in keys:
            each = slices[hash(key) % num_slices]
            if key in each:
                del each[key]
                gone.append(key)
        return gone

    def pop_some(self, most: int) -> list[tuple[K, V]]:
        """Remove and return keys with their values, `most` of them or all that there are."""
        taken: list[tuple[K, V]] = []
        for each in filter(None, self.slices):
            taken += [each.popitem() for _ in range(min(len(each), most - len(taken)))]
            if len(taken) == most:
                break
        return taken

    def items(self) -> Iterator[tuple[K, V]]:
        """Return all keys with their values."""
        for each in self.slices:
            yield from each.items()

    def values(self) -> Iterator[V]:
        """Return all values."""
        for each in self.slices:
            yield from each.values()

    def slice(self, index: int) -> Mapping[K, V]:
        """Return one slice. Together, all slices have each key once that was there all the time, whatever
        changed between reading two of them."""
        return self.slices[index]

    def clear(self) -> None:
        """Remove all keys."""
        for each in self.slices:
            each.clear()
