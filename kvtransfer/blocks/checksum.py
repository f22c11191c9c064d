"""The checksum of a piece of KV: (block, layer range, head range), equal bit for bit on every device.

The piece's bytes, its runs concatenated in layout order, are read as 64-bit little-endian words
w_0 ... w_(n-1), the last one padded with zero bytes. All arithmetic is modulo 2^64:

    mix(x):  x ^= x >> 32;  x *= 0xFF51AFD7ED558CCD
             x ^= x >> 32;  x *= 0xC4CEB9FE1A85EC53
             x ^= x >> 32
    S        = sum over i of mix(w_i + (i + 1) * 0x9E3779B97F4A7C15)
    checksum = mix(S + mix(number of bytes))

`mix` is a bijection, so a change within one word always changes the sum; exchanged words, a lost tail or
bytes of another place leave it equal only by chance (2^-64). Words may be summed in any order, on any number
of threads. The checksum does not protect against forgery. It is part of the NVMe format: never change it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

MASK: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
MULTIPLIER_1: Final = 0xFF51AFD7ED558CCD
MULTIPLIER_2: Final = 0xC4CEB9FE1A85EC53
SHIFT: Final = 32
WORD_BYTES: Final = 8

_CHUNK_WORDS = 1 << 14
_TABLE_WORDS = 1 << 17

Buffer = memoryview | bytes | bytearray
_Words = npt.NDArray[np.uint64]

_SHIFT = np.uint64(SHIFT)
_MULTIPLIER_1 = np.uint64(MULTIPLIER_1)
_MULTIPLIER_2 = np.uint64(MULTIPLIER_2)
_POSITIONS: _Words = np.arange(1, _TABLE_WORDS + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def mix(word: int) -> int:
    """Apply the bijection of 64-bit words to a Python int."""
    word ^= word >> SHIFT
    word = word * MULTIPLIER_1 & MASK
    word ^= word >> SHIFT
    word = word * MULTIPLIER_2 & MASK
    return word ^ (word >> SHIFT)


def finish(total: int, num_bytes: int) -> int:
    """Compute the checksum from the sum S over all words and the piece's length."""
    return mix((total + mix(num_bytes)) & MASK)


def finish_all(totals: _Words, num_bytes: int) -> list[int]:
    """Compute the checksums of pieces of one length from their sums S, uint64 [num_pieces]."""
    words = totals + np.uint64(mix(num_bytes))
    for multiplier in (_MULTIPLIER_1, _MULTIPLIER_2):
        words ^= words >> _SHIFT
        words *= multiplier
    words ^= words >> _SHIFT
    finished: list[int] = words.tolist()
    return finished


class Checksummer:
    """Sums pieces with numpy on one core, in chunks that stay in the cache. Every thread needs its own."""

    def __init__(self) -> None:
        self._mixed = np.empty(_CHUNK_WORDS, dtype=np.uint64)
        self._shifted = np.empty(_CHUNK_WORDS, dtype=np.uint64)

    def sum(self, parts: Iterable[Buffer]) -> int:
        """Compute the checksum of the concatenation of `parts` (contiguous buffers of bytes)."""
        total, num_bytes, carry = 0, 0, b""
        for part in parts:
            view = memoryview(part).cast("B")
            if carry:  # the part before ended inside a word
                needed = WORD_BYTES - len(carry)
                carry += bytes(view[:needed])
                view = view[needed:]
                if len(carry) < WORD_BYTES:
                    continue
                total += self._sum_words(np.frombuffer(carry, dtype="<u8"), num_bytes // WORD_BYTES)
                num_bytes += WORD_BYTES
            whole = len(view) // WORD_BYTES * WORD_BYTES
            total += self._sum_words(np.frombuffer(view[:whole], dtype="<u8"), num_bytes // WORD_BYTES)
            num_bytes += whole
            carry = bytes(view[whole:])
        if carry:
            last = np.frombuffer(carry.ljust(WORD_BYTES, b"\0"), dtype="<u8")
            total += self._sum_words(last, num_bytes // WORD_BYTES)
        return finish(total & MASK, num_bytes + len(carry))

    def _sum_words(self, words: _Words, first: int) -> int:
        """Return the mixed sum (not yet modulo 2^64) of words whose positions in the piece start at
        `first`."""
        total, start = 0, 0
        while start < len(words):
            base, row = divmod(first + start, _TABLE_WORDS)
            count = min(len(words) - start, _CHUNK_WORDS, _TABLE_WORDS - row)
            mixed, shifted = self._mixed[:count], self._shifted[:count]
            np.add(words[start : start + count], _POSITIONS[row : row + count], out=mixed)
            if base:
                np.add(mixed, np.uint64(base * _TABLE_WORDS * GOLDEN & MASK), out=mixed)
            for multiplier in (_MULTIPLIER_1, _MULTIPLIER_2):
                np.right_shift(mixed, _SHIFT, out=shifted)
                np.bitwise_xor(mixed, shifted, out=mixed)
                np.multiply(mixed, multiplier, out=mixed)
            np.right_shift(mixed, _SHIFT, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            total += int(np.add.reduce(mixed))
            start += count
        return total


def checksum(data: Buffer) -> int:
    """Compute the checksum of one contiguous piece."""
    return Checksummer().sum((data,))
