"""Metrics as Prometheus scrapes them from the process itself, with `prometheus_client`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cluster.metrics.registry import PREFIX, MetricsRegistry, metric_of

# The type of the content that `text` returns.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class ScrapedRegistry(MetricsRegistry):
    """Keeps the values that were set since `clear`, so that a series whose subject is gone disappears at
    once."""

    def __init__(self, **common: str) -> None:
        super().__init__(common)
        self._families: dict[str, Family] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        metric = metric_of(name, "gauge")
        family = self._families.setdefault(
            name, GaugeMetricFamily(PREFIX + name, metric.help, labels=metric.labels)
        )
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric(list(self._tags(metric, labels).values()), value)

    def total(self, name: str, total: float, **labels: str) -> None:
        metric = metric_of(name, "counter")
        family = self._families.setdefault(
            name, CounterMetricFamily(PREFIX + name, metric.help, labels=metric.labels)
        )
        assert isinstance(family, CounterMetricFamily)
        family.add_metric(list(self._tags(metric, labels).values()), total)

    def histogram(self, name: str, buckets: Sequence[tuple[str, int]], total: float, **labels: str) -> None:
        metric = metric_of(name, "histogram")
        family = self._families.setdefault(
            name, HistogramMetricFamily(PREFIX + name, metric.help, labels=metric.labels)
        )
        assert isinstance(family, HistogramMetricFamily)
        counts = [(bound, float(count)) for bound, count in buckets]
        family.add_metric(list(self._tags(metric, labels).values()), counts, total)

    def clear(self) -> None:
        """Forget everything."""
        self._families.clear()

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(_Collected(self._families.values()))


class _Collected(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families
