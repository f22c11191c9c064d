"""A map that can be read a slice at a time while it changes in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

V = TypeVar("V")

NUM_SLICES = 1024


class SlicedMap(Generic[V]):
    """Maps hashed keys, each of which has its place in one of `NUM_SLICES` slices as long as it is there."""

    def __init__(self) -> None:
        self._slices: tuple[dict[bytes, V], ...] = tuple({} for _ in range(NUM_SLICES))

    def __len__(self) -> int:
        return sum(map(len, self._slices))

    def __iter__(self) -> Iterator[bytes]:
        for each in self._slices:
            yield from each

    def __contains__(self, key: object) -> bool:
        return key in self._slices[hash(key) % NUM_SLICES]

    def __getitem__(self, key: bytes) -> V:
        return self._slices[hash(key) % NUM_SLICES][key]

    def __setitem__(self, key: bytes, value: V) -> None:
        self._slices[hash(key) % NUM_SLICES][key] = value

    def get(self, key: bytes) -> V | None:
        """Return the value of a key; None: it is not there."""
        return self._slices[hash(key) % NUM_SLICES].get(key)

    def pop(self, key: bytes) -> V | None:
        """Remove a key and return its value; None: it was not there."""
        return self._slices[hash(key) % NUM_SLICES].pop(key, None)

    def values(self) -> Iterator[V]:
        """Return all values."""
        for each in self._slices:
            yield from each.values()

    def slice(self, index: int) -> Mapping[bytes, V]:
        """Return one slice: all slices have every key once, whatever changed between reading two of them,
        but those that came or went meanwhile."""
        return self._slices[index]
