"""The one place where metrics meet Ray, whose agent on each node shows them to Prometheus: totals become
increments, and each series begins at zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ray.util import metrics as ray_metrics

from cluster.metrics.metric import Metric
from cluster.metrics.registry import PREFIX, MetricsRegistry, metric_of

# The least increment that a counter takes: lets a series begin before its first event, so that `increase`
# sees that one too. Added to anything it is lost.
_NOTHING = 5e-324


class Gauge(Protocol):
    """The part of Ray's gauge that is used."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


class Counter(Protocol):
    """The part of Ray's counter that is used; it adds `_total` to its name."""

    def inc(self, value: float, tags: dict[str, str]) -> None: ...


class RayRegistry(MetricsRegistry):
    """Exports through Ray's gauges and counters.

    `make_gauge` and `make_counter` take a name, a help text and the label names. Histograms are exported as
    totals by bucket (`_bucket`, `_sum`, `_count`), because Ray's own takes single values and loses their sum.
    """

    def __init__(
        self,
        make_gauge: Callable[[str, str, tuple[str, ...]], Gauge],
        make_counter: Callable[[str, str, tuple[str, ...]], Counter],
        common: Mapping[str, str],
    ) -> None:
        super().__init__(common)
        self._make_gauge = make_gauge
        self._make_counter = make_counter
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        metric = metric_of(name, "gauge")
        self._gauge(metric, name).set(value, self._tags(metric, labels))

    def total(self, name: str, total: float, **labels: str) -> None:
        metric = metric_of(name, "counter")
        tags = self._tags(metric, labels)
        key = name, tuple(tags.values())
        counter = self._counters.get(name)
        if counter is None:
            counter = self._make_counter(PREFIX + name.removesuffix("_total"), metric.help, metric.labels)
            self._counters[name] = counter
        if key not in self._totals:
            counter.inc(_NOTHING, tags)
        counted = self._totals.setdefault(key, 0.0)
        if total > counted:
            self._totals[key] = total
            counter.inc(total - counted, tags)

    def histogram(self, name: str, buckets: Sequence[tuple[str, int]], total: float, **labels: str) -> None:
        metric = metric_of(name, "histogram")
        tags = self._tags(metric, labels)
        bucket = self._gauge(metric, f"{name}_bucket", "le")
        for bound, count in buckets:
            bucket.set(count, {**tags, "le": bound})
        self._gauge(metric, f"{name}_sum").set(total, tags)
        self._gauge(metric, f"{name}_count").set(buckets[-1][1], tags)

    def _gauge(self, metric: Metric, name: str, *more_labels: str) -> Gauge:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._make_gauge(PREFIX + name, metric.help, (*metric.labels, *more_labels))
            self._gauges[name] = gauge
        return gauge


def ray_registry(**common: str) -> RayRegistry:
    """Return a registry whose metrics Ray exports as `ray_tandem_...`; `common` are label values that all
    have."""
    return RayRegistry(ray_metrics.Gauge, ray_metrics.Counter, common)
