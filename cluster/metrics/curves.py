"""The events second by second at a gateway, and the same of all gateways: counts and times, from which curves
and percentiles are made. Seconds are merged as buckets, because percentiles cannot be."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from kvtransfer.codec import Part

# Seconds that are remembered one by one.
RING_S = 330
# How far back `curves` goes.
CURVE_S = 300
# The factor from one bucket of a `Spread` to the next: a quantile is off by at most 1 %.
_GROWTH = 1.02
_LOG_GROWTH = math.log(_GROWTH)
_LEAST = 1e-6


class Spread:
    """Values in buckets of 2 % width: quantiles of any number of them in little memory. Values of at most a
    microsecond are one."""

    def __init__(self, buckets: Mapping[int, int] | None = None) -> None:
        self.buckets: Counter[int] = Counter(buckets or {})
        self.num_values = sum(self.buckets.values())

    def add(self, value: float, count: int = 1) -> None:
        """Add the value `count` times."""
        self.buckets[_bucket(value)] += count
        self.num_values += count

    def merge(self, others: Iterable[Spread]) -> Self:
        """Add all values of the others; returns itself."""
        for other in others:
            self.buckets.update(other.buckets)
            self.num_values += other.num_values
        return self

    def quantile(self, share: float) -> float:
        """Return the value that `share` of the values do not exceed; 0 without values."""
        wanted = max(1, math.ceil(share * self.num_values))
        so_far = 0
        for bucket in sorted(self.buckets):
            so_far += self.buckets[bucket]
            if so_far >= wanted:
                return float(_LEAST * _GROWTH ** (bucket - 0.5))
        return 0.0


def _bucket(value: float) -> int:
    return math.ceil(math.log(value / _LEAST) / _LOG_GROWTH) if value > _LEAST else 0


class Point(NamedTuple):
    """A second of a curve; times in seconds, `at` is unix time."""

    at: float
    p50: float
    p90: float
    p99: float


class Curves(NamedTuple):
    """Time to first token, and time between tokens, of each second that had any; oldest first."""

    ttft: list[Point]
    itl: list[Point]


class Window(Part, frozen=True):
    """The events of the last `window_s` seconds. Quantiles are 0 without values."""

    window_s: float
    num_arrived: int = 0
    # Prompt tokens of the requests that arrived.
    num_prompt_tokens: int = 0
    # Prompt tokens that prefill had to compute: those that were not cached anywhere.
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_failed: int = 0
    # Requests that ended for want of capacity, among `num_failed`.
    num_refused: int = 0
    ttft_p50_s: float = 0.0
    ttft_p90_s: float = 0.0
    ttft_p99_s: float = 0.0
    itl_p50_s: float = 0.0
    itl_p90_s: float = 0.0
    itl_p99_s: float = 0.0
    # Prompts by the pool whose replicas computed them.
    pool_to_prompts: dict[str, int] = {}


# The fields of `Window` that are counted.
COUNTED = tuple(name for name in Window.__struct_fields__ if name.startswith("num_"))


class SecondCounts(Part, frozen=True):
    """A second of one gateway, as gateways send it to each other."""

    at: int
    # Counts by field of `Window`.
    counts: dict[str, int]
    # Times by bucket of a `Spread`.
    ttft: dict[int, int]
    itl: dict[int, int]
    # Prompts as in `Window`.
    pool_to_prompts: dict[str, int] = {}


@dataclass(slots=True)
class Second:
    """A second: of one gateway, or of several."""

    at: int
    # Counts by field of `Window`.
    counts: Counter[str] = field(default_factory=Counter)
    ttft: Spread = field(default_factory=Spread)
    itl: Spread = field(default_factory=Spread)
    # Prompts as in `Window`.
    pool_to_prompts: Counter[str] = field(default_factory=Counter)

    def add(self, other: SecondCounts) -> None:
        """Add the events of another one; counts that a `Window` has not are left out."""
        for name in COUNTED:
            self.counts[name] += other.counts.get(name, 0)
        self.ttft.merge([Spread(other.ttft)])
        self.itl.merge([Spread(other.itl)])
        self.pool_to_prompts.update(other.pool_to_prompts)


class SecondRing:
    """The last `RING_S` seconds of one gateway, by its monotonic clock."""

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque()

    def second(self, now: float) -> Second:
        """Return the counts to which the present events are added."""
        at = int(now)
        if not self._seconds or self._seconds[-1].at < at:
            self._seconds.append(Second(at))
            while self._seconds[0].at < at - RING_S:
                self._seconds.popleft()
        return self._seconds[-1]

    def since(self, at: float) -> list[Second]:
        """Return the seconds from this one on, oldest first."""
        return [each for each in self._seconds if each.at >= at]

    def counts_since(self, at: int) -> tuple[SecondCounts, ...]:
        """Return the seconds from this one on, for another gateway."""
        return tuple(
            SecondCounts(
                each.at,
                dict(each.counts),
                dict(each.ttft.buckets),
                dict(each.itl.buckets),
                dict(each.pool_to_prompts),
            )
            for each in self.since(at)
        )


def merged(parts: Iterable[tuple[float, Iterable[SecondCounts]]]) -> list[Second]:
    """Return the seconds of several gateways as seconds of one clock, oldest first.

    Each gateway's seconds come with what is to be added to its clock.
    """
    seconds: dict[int, Second] = {}
    for offset, counts in parts:
        for each in counts:
            at = math.floor(each.at + offset)
            seconds.setdefault(at, Second(at)).add(each)
    return [seconds[at] for at in sorted(seconds)]


def curves_of(seconds: Sequence[Second], now: float, wall: float) -> Curves:
    """Return the curves of the last `CURVE_S` seconds; `wall` is the unix time of `now`."""
    shown = [each for each in seconds if each.at >= now - CURVE_S]
    offset = wall - now
    return Curves(
        [_point(each.at + offset, each.ttft) for each in shown if each.ttft.num_values],
        [_point(each.at + offset, each.itl) for each in shown if each.itl.num_values],
    )


def window_of(seconds: Sequence[Second], now: float, window_s: float = 60.0) -> Window:
    """Return the sum of the last `window_s` seconds, at most `RING_S`."""
    summed = [each for each in seconds if each.at > now - min(window_s, RING_S) - 1]
    counts: Counter[str] = Counter()
    prompts: Counter[str] = Counter()
    for each in summed:
        counts.update(each.counts)
        prompts.update(each.pool_to_prompts)
    ttft = Spread().merge(each.ttft for each in summed)
    itl = Spread().merge(each.itl for each in summed)
    return Window(
        window_s=window_s,
        ttft_p50_s=ttft.quantile(0.5),
        ttft_p90_s=ttft.quantile(0.9),
        ttft_p99_s=ttft.quantile(0.99),
        itl_p50_s=itl.quantile(0.5),
        itl_p90_s=itl.quantile(0.9),
        itl_p99_s=itl.quantile(0.99),
        pool_to_prompts=dict(prompts),
        **counts,
    )


def _point(at: float, spread: Spread) -> Point:
    return Point(at, spread.quantile(0.5), spread.quantile(0.9), spread.quantile(0.99))
