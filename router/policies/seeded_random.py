"""Random numbers that a seed determines, so that equal seeds make equal decisions."""

from __future__ import annotations

_MASK_64 = (1 << 64) - 1


class SeededRandom:
    """Draws numbers by hashing a counter with the seed (splitmix64)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK_64

    def draw(self) -> float:
        """Draw a number from [0, 1)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK_64
        mixed = ((self._state ^ self._state >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK_64
        return ((mixed ^ mixed >> 31) >> 11) * 2.0**-53

    def index(self, count: int) -> int:
        """Draw one of the numbers 0 to `count` - 1."""
        return int(self.draw() * count)
