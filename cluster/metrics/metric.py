"""The declaration of a metric: its labels, its unit, and its value."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from workers.stats_record import BATCH_BOUNDS

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One metric. `why_empty` says when it has no series on a healthy run; "": it always has one.

    `field` names the statistic that it shows, times `scale`, in the record that is exported (of a replica
    `workers.stats_record.ReplicaStats`); where that is a mapping, its keys are values of the last label. "":
    the exporter computes it.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    help: str
    why_empty: str = ""
    buckets: tuple[float, ...] = ()
    field: str = ""
    scale: float = 1.0


NEEDS_FAULT = "something must fail first"
NEEDS_HAND_OVER = "needs a hand-over: separate pools, and prompts of more than a block"
GB = 1e9

# Upper bounds of histogram buckets, in seconds where the name says so.
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STAGE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_RATIO = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)

# The gateways' measurements of requests, by metric.
REQUEST_TIMES = {
    "ttft_seconds": _TTFT_S,
    "ttft_prediction_ratio": _RATIO,
    "tpot_prediction_ratio": _RATIO,
    "tpot_seconds": _ITL_S,
    "itl_seconds": _ITL_S,
    "e2e_seconds": _E2E_S,
    "queue_seconds": _STAGE_S,
    "prefill_seconds": _TTFT_S,
    "hand_over_seconds": _STAGE_S,
}

# Bounds of the sequences of a step.
BATCH_SIZE = tuple(float(bound) for bound in BATCH_BOUNDS)


# Labels of the metrics that gateways export, of those that they measured of a replica's work, of those that
# replicas export, of their paths to other replicas, and of the stores of their nodes.
_GATEWAY = ("app", "gateway", "model")
_SERVED = ("app", "gateway", "model", "pool", "replica")
_REPLICA = ("app", "pool", "replica", "model")
_PATH = (*_REPLICA, "peer", "rank", "peer_rank", "transport", "device")
_NODE = ("app", "node")
_TIER = ("app", "node", "tier")

NEEDS_PAIR = "needs two replicas of separate pools"
NEEDS_STORE = "needs a store (`store.dram_gb`)"
NEEDS_NVME = "needs a tier on NVMe (`store.nvme_path`)"
NEEDS_STORED_PROMPT = "a prompt must be in the store and no longer on the device"
NEEDS_OVERLOAD = "more requests must come than the replicas can take"
NEEDS_MEASURED_STEPS = "replicas must have run some steps"
NEEDS_PRICE = "needs `costs.device_hour`, and replicas that have run some steps"
NEEDS_USED_UP_LIMIT = "a tenant must have used up a limit"
NEEDS_EXPERTS = "needs a model with experts, and enough tokens to tell them apart"
NEEDS_STATES = "needs a model whose layers partly have windows or keep states, and prompts with cached KV"
NEEDS_FULL_STORE = "the store must be full or unavailable"


def metric(
    labels: tuple[str, ...],
    name: str,
    field: str,
    unit: str,
    help_: str,
    *,
    by: str = "",
    why_empty: str = "",
    scale: float = 1.0,
    buckets: tuple[float, ...] = (),
) -> Metric:
    """Return a metric, whose name says which kind it is; `by` are labels in addition to those of its
    group."""
    kind: Kind = "histogram" if buckets else "counter" if name.endswith("_total") else "gauge"
    return Metric(name, kind, (*labels, *by.split()), unit, help_, why_empty, buckets, field, scale)


of_gateway = functools.partial(metric, _GATEWAY)
of_served = functools.partial(metric, _SERVED)
of_replica = functools.partial(metric, _REPLICA)
of_path = functools.partial(metric, _PATH)
of_node = functools.partial(metric, _NODE, why_empty=NEEDS_STORE)
of_tier = functools.partial(metric, _TIER, why_empty=NEEDS_STORE)


def times_of(name: str, help_: str, why_empty: str = "", unit: str = "seconds") -> Metric:
    return of_served(name, "", unit, help_, why_empty=why_empty, buckets=REQUEST_TIMES[name])
