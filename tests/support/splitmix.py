"""splitmix64 in plain Python integers, as published, and its inverse."""

from __future__ import annotations

MASK = 2**64 - 1
WEYL = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """Return splitmix64's finalizer of `x`."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def unmix(x: int) -> int:
    """Return the inverse of `mix`."""
    x ^= (x >> 31) ^ (x >> 62)
    x = (x * pow(0x94D049BB133111EB, -1, 2**64)) & MASK
    x ^= (x >> 27) ^ (x >> 54)
    x = (x * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & MASK
    return x ^ (x >> 30) ^ (x >> 60)


def reference_hash(seed: int, output_index: int, token_id: int) -> int:
    """Return the hash from which a token's noise is made."""
    key = mix((mix((seed ^ WEYL) & MASK) + output_index * WEYL) & MASK)
    return mix((key + (token_id + 1) * WEYL) & MASK)
