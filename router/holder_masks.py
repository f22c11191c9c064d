"""Bit masks of the replicas that hold each block key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import or_

# Masks that are remembered so that equal ones are one object; then they are forgotten, and begun again.
_NUM_REMEMBERED = 1 << 16


class HolderMasks(dict[bytes, int]):
    """Maps each key that anybody holds to its mask.

    Equal masks are one object, as far as they are remembered: with 1,000 replicas an integer takes up to 560
    bytes, and most blocks are at one replica, or with the other blocks of their prefix at the same few.
    """

    def __init__(self) -> None:
        super().__init__()
        self._remembered: dict[int, int] = {}

    def set_bit(self, bit: int, keys: Iterable[bytes]) -> None:
        """Set the bit in the mask of each key. Pass one object for all keys of one bit."""
        get, remembered = self.get, self._remembered
        if len(remembered) > _NUM_REMEMBERED:
            remembered.clear()
        for key in keys:
            mask = get(key, bit)
            if mask == bit:
                self[key] = bit
            elif (mask | bit) != mask:
                mask |= bit
                self[key] = remembered.setdefault(mask, mask)

    def set_bit_briefly(self, bit: int, keys: Sequence[bytes]) -> None:
        """Set the bit as `set_bit` does, in less time and more memory: for masks that change again soon."""
        self.update(zip(keys, map(or_, map(self.get, keys, repeat(0)), repeat(bit)), strict=True))

    def clear_bit(self, bit: int, keys: Iterable[bytes]) -> None:
        """Clear the bit in the mask of each key, and remove the keys that nobody holds any more."""
        others, get, remembered = ~bit, self.get, self._remembered
        for key in keys:
            mask = get(key, 0) & others
            if mask:
                self[key] = remembered.setdefault(mask, mask)
            else:
                self.pop(key, None)
