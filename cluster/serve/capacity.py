"""The resources that the processes request from Ray: pure functions over resource counts.

CPU shares are a means of placement only (Ray does not enforce them), so small machines get small shares:
all that is configured fits, and at least as much again stays free for replicas added while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cluster.config import GatewayConfig, PoolConfig
from cluster.scaling.resource_demand import QUANTUM, ReplicaDemand

# CPUs that an engine core requests: it waits for its ranks and for the network most of the time.
ENGINE_CORE_CPUS = 0.05
GATEWAY_CPUS = 0.05


def plan_cpus(
    pools: Sequence[PoolConfig], num_gateways: int, nodes: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the CPUs per rank for each pool. A pool that configures its own keeps it; the others share the
    rest.

    A share is at most the rank's threads, and small enough that everything fits and that the pools which
    share can be doubled while they run. `nodes` are what each node has left.
    """
    num_cpus = sum(node.get("CPU", 0.0) for node in nodes)
    fixed = num_gateways * GATEWAY_CPUS
    num_auto = 0
    for pool in pools:
        fixed += pool.replicas * ENGINE_CORE_CPUS
        if pool.cpus_per_rank is None:
            num_auto += pool.replicas * pool.num_ranks
            fixed += pool.replicas * ENGINE_CORE_CPUS  # that of the replica added later
        else:
            fixed += pool.replicas * pool.num_ranks * pool.cpus_per_rank
    share = max((num_cpus - fixed) / max(2 * num_auto, 1), 0.0)
    return {
        pool.name: pool.cpus_per_rank
        if pool.cpus_per_rank is not None
        else max(math.floor(min(share, pool.engine.num_threads) / QUANTUM + 1e-6) * QUANTUM, QUANTUM)
        for pool in pools
    }


def rank_resources(pool: PoolConfig, cpus_per_rank: float, stage: int) -> dict[str, float]:
    """Return the resources that one rank of the stage requests."""
    resources = {"CPU": cpus_per_rank}
    if pool.stage_devices[stage] == "cuda":
        resources["GPU"] = pool.num_gpus_per_rank
    return resources


def bundles(pool: PoolConfig, cpus_per_rank: float) -> list[dict[str, float]]:
    """Return the placement group of one replica: the engine core's bundle first, then one for each stage,
    whose ranks share a node because they share the bundle."""
    stages = (rank_resources(pool, cpus_per_rank, stage) for stage in range(pool.pp))
    whole = ({name: pool.tp * amount for name, amount in rank.items()} for rank in stages)
    return [bundle | pool.resources for bundle in ({"CPU": ENGINE_CORE_CPUS}, *whole)]


def gateway_bundle(gateway: GatewayConfig) -> dict[str, float]:
    """Return the resources that one gateway requests."""
    return {"CPU": GATEWAY_CPUS} | gateway.resources


def placement_strategy(pool: PoolConfig) -> str:
    """Return Ray's strategy: a replica of one stage stays on one node; stages are packed, and spread only
    where needed."""
    return "STRICT_PACK" if pool.pp == 1 else "PACK"


def demands(pools: Sequence[PoolConfig], cpus: Mapping[str, float]) -> list[ReplicaDemand]:
    """Return the demand of every replica of every pool."""
    return [
        ReplicaDemand(pool.name, tuple(bundles(pool, cpus[pool.name])), may_spread=pool.pp > 1)
        for pool in pools
        for _ in range(pool.replicas)
    ]
