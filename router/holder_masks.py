"""Bit masks of the replicas that hold each block key."""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.blocks.keys import KEY_BYTES
from kvtransfer.common.sliced_map import SlicedMap
from router.native import RouterKernel

# Of the masks without compiled code. 10 million keys make slices that grow in some milliseconds. The number
# is a prime (`SlicedMap`).
_NUM_SLICES = 251
# Masks that are remembered so that equal ones are one object; then they are forgotten, and begun again.
_NUM_REMEMBERED = 1 << 16
_WORD_BITS = 64
_WORD_BYTES = 8

Words = ctypes.Array[ctypes.c_uint64]


class HolderMasks(Protocol):
    """Maps each key that anybody holds to its mask. Keys without a bit are not there."""

    def __len__(self) -> int: ...

    def set_bit(self, bit: int, keys: Sequence[bytes]) -> None:
        """Set a bit, by its number, in the mask of each key."""

    def clear_bit(self, bit: int, keys: Sequence[bytes]) -> None:
        """Clear a bit in the mask of each key."""

    def found(self, keys: Sequence[bytes]) -> list[int]:
        """Return the mask of each key; 0: nobody holds it."""


class PlainMasks(SlicedMap[bytes, int]):
    """The masks as integers.

    Equal masks are one object, as far as they are remembered: with 1,000 replicas an integer takes up to 560
    bytes, and most blocks are at one replica, or with the other blocks of their prefix at the same few.
    """

    __slots__ = ("_remembered",)

    def __init__(self) -> None:
        super().__init__(_NUM_SLICES)
        self._remembered: dict[int, int] = {}

    def found(self, keys: Sequence[bytes]) -> list[int]:
        """Return the mask of each key; 0: nobody holds it."""
        slices = self.slices
        return [slices[hash(key) % _NUM_SLICES].get(key, 0) for key in keys]

    def set_bit(self, bit: int, keys: Sequence[bytes]) -> None:
        """Set a bit, by its number, in the mask of each key."""
        slices, remembered, one = self.slices, self._remembered, 1 << bit
        if len(remembered) > _NUM_REMEMBERED:
            remembered.clear()
        for key in keys:
            masks = slices[hash(key) % _NUM_SLICES]
            mask = masks.get(key, 0)
            if (mask | one) != mask:
                mask |= one
                masks[key] = remembered.setdefault(mask, mask)

    def clear_bit(self, bit: int, keys: Sequence[bytes]) -> None:
        """Clear a bit in the mask of each key."""
        slices, remembered, others = self.slices, self._remembered, ~(1 << bit)
        for key in keys:
            masks = slices[hash(key) % _NUM_SLICES]
            mask = masks.get(key, 0) & others
            if mask:
                masks[key] = remembered.setdefault(mask, mask)
            else:
                masks.pop(key, None)


class CompiledMasks:
    """The masks in compiled code (`block_table.h`), in some 50 bytes a key."""

    def __init__(self, kernel: RouterKernel) -> None:
        self._kernel = kernel
        self._table = kernel.new_block_table()
        weakref.finalize(self, kernel.delete_block_table, self._table)

    def __len__(self) -> int:
        return int(self._kernel.block_table_size(self._table))

    def set_bit(self, bit: int, keys: Sequence[bytes]) -> None:
        """Set a bit, by its number, in the mask of each key."""
        if keys:
            self._kernel.change_masks(self._table, _packed(keys), len(keys), bit, True)

    def clear_bit(self, bit: int, keys: Sequence[bytes]) -> None:
        """Clear a bit in the mask of each key."""
        if keys:
            self._kernel.change_masks(self._table, _packed(keys), len(keys), bit, False)

    def leading(self, keys: Sequence[bytes], num_words: int) -> tuple[Words, int]:
        """Return the masks of the leading keys that anybody holds, as words, and the number of these keys."""
        words = (ctypes.c_uint64 * (len(keys) * num_words))()
        num_found = self._kernel.read_masks(self._table, _packed(keys), len(keys), True, words, num_words)
        return words, num_found

    def found(self, keys: Sequence[bytes], num_words: int = 256) -> list[int]:
        """Return the mask of each key; 0: nobody holds it."""
        words = (ctypes.c_uint64 * (len(keys) * num_words))()
        self._kernel.read_masks(self._table, _packed(keys), len(keys), False, words, num_words)
        data, stride = bytes(words), num_words * _WORD_BYTES
        return [
            int.from_bytes(data[start : start + stride], "little") for start in range(0, len(data), stride)
        ]


def _packed(keys: Sequence[bytes]) -> bytes:
    """Return the keys one after the other. Those of another length, which tests have, are hashed."""
    if set(map(len, keys)) <= {KEY_BYTES}:
        return b"".join(keys)
    return b"".join(
        key if len(key) == KEY_BYTES else hashlib.blake2b(key, digest_size=KEY_BYTES).digest() for key in keys
    )
