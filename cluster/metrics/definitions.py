"""Every metric that is exported, declared once. At Prometheus each name begins with `ray_tandem_`."""

from __future__ import annotations

from cluster.metrics.gateway_metrics import (
    ADMISSION,
    CLASSES,
    COSTS,
    OUTPUT,
    POOLS,
    RECORDING,
    REQUESTS,
    TENANT_CLASSES,
    TENANTS,
)
from cluster.metrics.replica_metrics import ENGINES, KV, STORES, TRANSFER

SECTIONS = {
    "Requests": REQUESTS,
    "Output": OUTPUT,
    "Admission": ADMISSION,
    "Classes": CLASSES,
    "Tenants": TENANTS,
    "Tenants by class": TENANT_CLASSES,
    "Costs": COSTS,
    "Pools": POOLS,
    "Recording": RECORDING,
    "Engines": ENGINES,
    "KV": KV,
    "Transfer": TRANSFER,
    "Stores": STORES,
}
# All metrics by name.
METRICS = {it.name: it for section in SECTIONS.values() for it in section}
