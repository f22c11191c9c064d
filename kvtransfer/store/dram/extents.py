"""Allocate the free space of an arena, in granules: best fit, merged neighbors, in constant time."""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """The free ranges of [0, num_total). `take` uses the smallest range that is large enough, of equal ones
    the one freed last, because its pages are the likeliest to be in the caches."""

    def __init__(self, num_total: int) -> None:
        self.num_total = num_total
        self.num_free = 0
        self._start_to_count: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        self._count_to_starts: dict[int, dict[int, None]] = {}
        self._counts: list[int] = []  # the keys of _count_to_starts, ascending

    def take(self, count: int) -> int | None:
        """Take `count` consecutive granules and return the first; None when there are none."""
        place = bisect_left(self._counts, count)
        if place == len(self._counts):
            return None
        found = self._counts[place]
        start = next(reversed(self._count_to_starts[found]))
        self._remove(start, found)
        if found > count:
            self._insert(start + count, found - count)
        return start

    def give(self, start: int, count: int) -> None:
        """Free the granules [start, start + count), none of which is free."""
        assert count > 0
        assert 0 <= start <= self.num_total - count
        before = self._end_to_start.get(start)
        if before is not None:
            self._remove(before, start - before)
            start, count = before, start + count - before
        after = self._start_to_count.get(start + count)
        if after is not None:
            self._remove(start + count, after)
            count += after
        self._insert(start, count)

    def ranges(self) -> list[tuple[int, int]]:
        """Return all free ranges as (start, count), ascending."""
        return sorted(self._start_to_count.items())

    def _insert(self, start: int, count: int) -> None:
        self.num_free += count
        self._start_to_count[start] = count
        self._end_to_start[start + count] = start
        starts = self._count_to_starts.get(count)
        if starts is None:
            starts = self._count_to_starts[count] = {}
            insort(self._counts, count)
        starts[start] = None

    def _remove(self, start: int, count: int) -> None:
        self.num_free -= count
        del self._start_to_count[start]
        del self._end_to_start[start + count]
        starts = self._count_to_starts[count]
        del starts[start]
        if not starts:
            del self._count_to_starts[count]
            del self._counts[bisect_left(self._counts, count)]
