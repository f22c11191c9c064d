"""The tables of docs/observability.md, made of the catalogue. Run it to print them."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.metrics.definitions import SECTIONS, Metric

HEAD = "| metric | kind | labels | meaning | empty while |\n|---|---|---|---|---|\n"


def table(metrics: Iterable[Metric]) -> str:
    """One section, as it stands in the page."""
    return HEAD + "".join(map(_row, metrics))


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    unit = f" ({metric.unit})" if metric.unit else ""
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{unit} | {metric.why_empty} |\n"


if __name__ == "__main__":
    for title, metrics in SECTIONS.items():
        print(f"### {title}\n\n{table(metrics)}")
