"""Every metric that is exported, declared once. At Prometheus each name begins with `ray_tandem_`."""

from __future__ import annotations

from cluster.observe.gateway_catalogue import POOLS, REQUESTS, TENANTS
from cluster.observe.metric import Metric
from cluster.observe.replica_catalogue import ENGINES, KV, STORES, TRANSFER

SECTIONS = {
    "Requests": REQUESTS,
    "Tenants": TENANTS,
    "Pools": POOLS,
    "Engines": ENGINES,
    "KV": KV,
    "Transfer": TRANSFER,
    "Stores": STORES,
}
METRICS = {metric.name: metric for section in SECTIONS.values() for metric in section}
"""By name."""


def series_names(metric: Metric) -> tuple[str, ...]:
    """Under which Prometheus knows it, without `ray_tandem_`."""
    if metric.kind == "histogram":
        return tuple(f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))
    return (metric.name,)
