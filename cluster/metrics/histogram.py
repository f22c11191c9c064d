"""Distributions that are cheap to add to: fixed buckets for Prometheus, and one that answers quantiles."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Sequence

# Of one bucket of a `Spread` to the next: a quantile is off by at most 1 %.
_GROWTH = 1.02
_LEAST = 1e-6


class Histogram:
    """Totals for Prometheus: how many values were at most each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add the value `count` times."""
        self._counts[bisect.bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def num_values(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """(`le`, count of values up to it) for each bound and for `+Inf`, as Prometheus writes them."""
        return cumulative(self.bounds, self._counts)


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, int]]:
    """The same, of counts by bucket; the last bucket is what exceeds every bound."""
    assert len(counts) == len(bounds) + 1
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    sums: list[tuple[str, int]] = []
    so_far = 0
    for name, count in zip(names, counts, strict=True):
        so_far += count
        sums.append((name, so_far))
    return sums


class Spread:
    """Values in buckets of 2 % width: quantiles of any number of them in little memory. Values of at most a
    microsecond are one."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.num_values = 0

    def add(self, value: float, count: int = 1) -> None:
        """Add the value `count` times."""
        self._buckets[_bucket(value)] += count
        self.num_values += count

    def merge(self, others: Iterable[Spread]) -> Spread:
        """Add all values of the others; returns itself."""
        for other in others:
            self._buckets.update(other._buckets)
            self.num_values += other.num_values
        return self

    def quantile(self, share: float) -> float:
        """The value that `share` of the values do not exceed; 0 without values."""
        wanted = max(1, math.ceil(share * self.num_values))
        so_far = 0
        for bucket in sorted(self._buckets):
            so_far += self._buckets[bucket]
            if so_far >= wanted:
                return float(_LEAST * _GROWTH ** (bucket - 0.5))
        return 0.0


def _bucket(value: float) -> int:
    return max(0, math.ceil(math.log(max(value, _LEAST) / _LEAST, _GROWTH)))
