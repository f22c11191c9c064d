"""Write a plan as the cluster's file, and as values of the chart."""

from __future__ import annotations

import math
from typing import Any

import yaml

from cluster.planning.device_split import pool_keys, with_sequences
from cluster.planning.plan import Plan, PlannedPool

# CPUs of a rank on a GPU: one launches kernels, and others move KV.
_CPUS_OF_RANK = 1


def cluster_file(plan: Plan) -> str:
    """Return `cluster.yaml`; `ClusterConfig` accepts it."""
    pools = [{**_pool(plan, pool), "replicas": pool.num_replicas} for pool in plan.pools]
    return yaml.safe_dump({"model": plan.model.source, "pools": pools}, sort_keys=False)


def chart_values(plan: Plan) -> str:
    """Return values of the chart. Where the model's weights come from stays for you to say."""
    pools: dict[str, Any] = {}
    for pool in plan.pools:
        keys = _pool(plan, pool)
        name = keys.pop("name")
        config = {**keys, "replicas": pool.num_replicas, "cpus_per_rank": _CPUS_OF_RANK}
        pools[str(name)] = {"config": config}
    if not plan.is_disaggregated:
        # The chart has two pools of its own.
        pools |= {"prefill": None, "decode": None}
    return yaml.safe_dump({"pools": pools}, sort_keys=False)


def _pool(plan: Plan, pool: PlannedPool) -> dict[str, Any]:
    capacity = pool.capacity
    keys = pool_keys(plan.model, plan.profile, capacity.split, capacity.role)
    if capacity.role == "prefill":
        return keys
    return with_sequences(keys, math.ceil(capacity.batch))
