"""Sets and counts declared metrics by name, for the exporter that shows them to Prometheus."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from cluster.metrics.definitions import METRICS
from cluster.metrics.metric import Kind, Metric

PREFIX = "tandem_"


class MetricsRegistry(ABC):
    """Sets and counts the metrics in `definitions` by name; any other name is a `KeyError`."""

    def __init__(self, common: Mapping[str, str]) -> None:
        """`common` are label values that every metric here has."""
        self._common = dict(common)

    @abstractmethod
    def set(self, name: str, value: float, **labels: str) -> None:
        """Set the value of a gauge."""

    @abstractmethod
    def total(self, name: str, total: float, **labels: str) -> None:
        """Bring a counter up to its total; a smaller one than before is ignored."""

    @abstractmethod
    def histogram(self, name: str, buckets: Sequence[tuple[str, int]], total: float, **labels: str) -> None:
        """Add a histogram: cumulative counts by `le`, the last of which is `+Inf`, and the sum of the
        values."""

    def export(self, metrics: Iterable[Metric], record: object, **labels: str) -> None:
        """Set each gauge, and bring each counter up, to the field of `record` that it is declared with."""
        for metric in metrics:
            found = operator.attrgetter(metric.field)(record)
            by_label = found.items() if isinstance(found, Mapping) else [("", found)]
            report = self.set if metric.kind == "gauge" else self.total
            for key, value in by_label:
                own = {**labels, metric.labels[-1]: key} if key else labels
                report(metric.name, value * metric.scale, **own)

    def _tags(self, metric: Metric, labels: Mapping[str, str]) -> dict[str, str]:
        tags = {**self._common, **labels}
        return {label: tags[label] for label in metric.labels}


def metric_of(name: str, kind: Kind) -> Metric:
    """Return the metric, which is of this kind."""
    metric = METRICS[name]
    assert metric.kind == kind, f"{name} is a {metric.kind}"
    return metric
