"""Write a plan as the cluster's file, and as values of the chart."""

from __future__ import annotations

import math
from typing import Any

import yaml

from cluster.planning.device_split import pool_keys, with_engine
from cluster.planning.plan import Plan, PlannedPool
from cluster.planning.store_tiers import TierPlan

# CPUs of a rank on a GPU: one launches kernels, and others move KV.
_CPUS_OF_RANK = 1
# The memory of a pod in the chart.
_POD_BYTES = 16 << 30
# Where the file puts the NVMe tier; you name a folder on your disk.
NVME_FOLDER = "/var/lib/tandem/kv"


def cluster_file(plan: Plan) -> str:
    """Return `cluster.yaml`; `ClusterConfig` accepts it."""
    pools = [{**_pool(plan, pool), "replicas": pool.num_replicas} for pool in plan.pools]
    store = {}
    if plan.tiers is not None:
        of_node = _store(plan.tiers, plan.tiers.num_nodes)
        store["store"] = {**of_node, **({"nvme_path": NVME_FOLDER} if "nvme_gb" in of_node else {})}
    return yaml.safe_dump({"model": plan.model.source, "pools": pools, **store}, sort_keys=False)


def chart_values(plan: Plan) -> str:
    """Return values of the chart. Where the model's weights come from stays for you to say."""
    pools: dict[str, Any] = {}
    for pool in plan.pools:
        keys = _pool(plan, pool)
        name = keys.pop("name")
        engine = keys.get("engine", {})
        num_cpus = max(engine.get("num_threads", 1), _CPUS_OF_RANK)
        config = {**keys, "replicas": pool.num_replicas, "cpus_per_rank": num_cpus}
        pools[str(name)] = {"config": config, **_pod_memory(plan, pool)}
    if not plan.is_disaggregated:
        # The chart has two pools of its own.
        pools |= {"prefill": None, "decode": None}
    values: dict[str, Any] = {"pools": pools}
    if plan.tiers is not None:
        values["config"] = {"store": _store(plan.tiers, plan.pools[0].num_replicas)}
    return yaml.safe_dump(values, sort_keys=False)


def _pod_memory(plan: Plan, pool: PlannedPool) -> dict[str, Any]:
    """Return the memory of a pod, which has one replica, where that is more than the chart's."""
    memory, num_devices = pool.capacity.memory, pool.capacity.split.num_devices
    num_bytes: float = _POD_BYTES + memory.host_bytes * num_devices
    if pool.profile.kind == "cpu":
        num_bytes += memory.allowed * num_devices
    if plan.tiers is not None:
        store = _store(plan.tiers, plan.pools[0].num_replicas)
        num_bytes += 1e9 * store["dram_gb"]
    if num_bytes <= _POD_BYTES:
        return {}
    return {"resources": {"memory": f"{math.ceil(num_bytes / 2**30)}Gi"}}


def _store(tiers: TierPlan, num_parts: int) -> dict[str, Any]:
    """Return the sizes of one of so many parts of the store: of a node, or of a pod."""
    dram_gb, nvme_gb = (math.floor(tiers.total_bytes(name) / num_parts / 1e9) for name in ("dram", "nvme"))
    # NVMe is read and written through host memory.
    store: dict[str, Any] = {"dram_gb": max(dram_gb, 1 if nvme_gb else 0)}
    return {**store, "nvme_gb": nvme_gb} if nvme_gb else store


def _pool(plan: Plan, pool: PlannedPool) -> dict[str, Any]:
    capacity = pool.capacity
    keys = pool_keys(plan.model, pool.profile, capacity.split, capacity.role)
    if capacity.role == "prefill":
        return keys
    sizes = {"max_sequences": math.ceil(capacity.batch), "tpot_objective_s": round(plan.load.tpot_s, 6)}
    return with_engine(keys, **sizes)
