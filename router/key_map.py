"""Maps and sets of the block keys of one replica, which may have a few blocks or a million."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import filterfalse
from typing import TypeVar

from kvtransfer.common.sliced_map import SlicedMap

V = TypeVar("V")

# A million keys make slices that grow in some tenths of a millisecond. The number is a prime (`SlicedMap`).
# One slice is searched faster, and is divided in some two milliseconds when it has so many keys.
_NUM_SLICES = 251
_MOST_IN_ONE_SLICE = 1 << 14


class KeyMap(SlicedMap[bytes, V]):
    """A map of block keys: one slice, and many from some thousands of keys on. `set_all` adds keys."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(1)

    def set_all(self, keys: Iterable[bytes], value: V) -> None:
        """Give all of these keys one value."""
        if len(self.slices) > 1:
            super().set_all(keys, value)
            return
        (before,) = self.slices
        before.update(dict.fromkeys(keys, value))
        if len(before) > _MOST_IN_ONE_SLICE:
            self.slices = tuple({} for _ in range(_NUM_SLICES))
            for key, its in before.items():
                self.slices[hash(key) % _NUM_SLICES][key] = its

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of these keys that are not there."""
        if len(self.slices) == 1:
            return list(filterfalse(self.slices[0].__contains__, keys))
        return super().missing(keys)


class KeySet(KeyMap[None]):
    """A set of block keys."""

    __slots__ = ()
