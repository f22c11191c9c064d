"""Every metric that is exported, declared once. At Prometheus each name begins with `ray_tandem_`."""

from __future__ import annotations

from cluster.metrics.gateway_metrics import ADMISSION, CLASSES, POOLS, RECORDING, REQUESTS, TENANTS
from cluster.metrics.replica_metrics import ENGINES, KV, STORES, TRANSFER

SECTIONS = {
    "Requests": REQUESTS,
    "Admission": ADMISSION,
    "Classes": CLASSES,
    "Tenants": TENANTS,
    "Pools": POOLS,
    "Recording": RECORDING,
    "Engines": ENGINES,
    "KV": KV,
    "Transfer": TRANSFER,
    "Stores": STORES,
}
# All metrics by name.
METRICS = {it.name: it for section in SECTIONS.values() for it in section}
