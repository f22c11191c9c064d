"""Keep the history of a cluster over the last hours, a point for each period.

A point has throughput, queue, prefix hits, KV and GPU memory in use, TTFT and ITL. There are two series of
points, a fine one and a long one, in bounded memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.metrics.curves import Second, Spread

QUANTILES = (0.5, 0.9, 0.99)


class Series(NamedTuple):
    """Points of `period_s`, over the last `span_s`."""

    period_s: int
    span_s: int


FINE = Series(10, 3600)
LONG = Series(60, 6 * 3600)


class Gauges(NamedTuple):
    """The values that the replicas and the queues of all gateways report at one moment."""

    num_waiting: int
    # The share of KV blocks in use, by the replicas' role.
    role_to_kv_share: Mapping[str, float]
    # The memory share of the GPU whose memory is fullest; None without GPUs.
    gpu_memory_share: float | None
    # Since the last report: prompt tokens that could have been cached, and those that were.
    num_queried_tokens: int
    num_hit_tokens: int


class TrendPoint(NamedTuple):
    """A period that begins at `at`, in unix time. Gauges are the highest of the period; values that were not
    measured are None or empty."""

    at: int
    output_tok_s: float
    num_waiting: int
    hit_share: float | None
    role_to_kv_share: dict[str, float]
    gpu_memory_share: float | None
    # Seconds, by `QUANTILES`.
    ttft: tuple[float, ...] | None
    itl: tuple[float, ...] | None


@dataclass(slots=True)
class _Period:
    at: int
    num_output_tokens: int = 0
    num_waiting: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    role_to_kv_share: dict[str, float] = field(default_factory=dict)
    gpu_memory_share: float | None = None
    ttft: Spread = field(default_factory=Spread)
    itl: Spread = field(default_factory=Spread)

    def add(self, seconds: Iterable[Second], gauges: Gauges) -> None:
        for second in seconds:
            self.num_output_tokens += second.counts["num_output_tokens"]
            self.ttft.merge([second.ttft])
            self.itl.merge([second.itl])
        self.num_waiting = max(self.num_waiting, gauges.num_waiting)
        self.num_queried_tokens += gauges.num_queried_tokens
        self.num_hit_tokens += gauges.num_hit_tokens
        for role, share in gauges.role_to_kv_share.items():
            self.role_to_kv_share[role] = max(share, self.role_to_kv_share.get(role, 0.0))
        if gauges.gpu_memory_share is not None:
            self.gpu_memory_share = max(gauges.gpu_memory_share, self.gpu_memory_share or 0.0)

    def point(self, period_s: int) -> TrendPoint:
        queried = self.num_queried_tokens
        return TrendPoint(
            at=self.at,
            output_tok_s=self.num_output_tokens / period_s,
            num_waiting=self.num_waiting,
            hit_share=min(1.0, self.num_hit_tokens / queried) if queried else None,
            role_to_kv_share=dict(self.role_to_kv_share),
            gpu_memory_share=self.gpu_memory_share,
            ttft=_quantiles(self.ttft),
            itl=_quantiles(self.itl),
        )


class Trends:
    """The points of both series, and of each the period that is not over yet."""

    def __init__(self) -> None:
        self._points: dict[Series, deque[TrendPoint]] = {
            series: deque(maxlen=series.span_s // series.period_s) for series in (FINE, LONG)
        }
        self._open: dict[Series, _Period | None] = dict.fromkeys(self._points)

    def add(self, at: int, seconds: Sequence[Second], gauges: Gauges) -> None:
        """Add the seconds from `at` to `at + FINE.period_s`, in unix time, and the gauges at their end; later
        calls have later ones."""
        for series, points in self._points.items():
            begin = at - at % series.period_s
            period = self._open[series]
            if period is not None and period.at != begin:
                points.append(period.point(series.period_s))
                period = None
            if period is None:
                period = _Period(begin)
            period.add(seconds, gauges)
            is_over = at + FINE.period_s >= begin + series.period_s
            if is_over:
                points.append(period.point(series.period_s))
            self._open[series] = None if is_over else period

    def since(self, at: float, span_s: float) -> tuple[Series, list[TrendPoint]]:
        """Return the points that begin at `at` or later, oldest first, of the finest series that has
        `span_s`."""
        series = FINE if span_s <= FINE.span_s else LONG
        return series, [point for point in self._points[series] if point.at >= at]


def _quantiles(spread: Spread) -> tuple[float, ...] | None:
    return tuple(spread.quantile(share) for share in QUANTILES) if spread.num_values else None
