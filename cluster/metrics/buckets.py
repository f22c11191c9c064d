"""The buckets of histograms, as Prometheus counts them."""

from __future__ import annotations

from collections.abc import Sequence


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, int]]:
    """Return (`le`, count of values up to it) of counts by bucket; the last bucket counts the values that
    exceed every bound."""
    assert len(counts) == len(bounds) + 1
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    sums: list[tuple[str, int]] = []
    so_far = 0
    for name, count in zip(names, counts, strict=True):
        so_far += count
        sums.append((name, so_far))
    return sums
