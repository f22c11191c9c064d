"""What the processes ask of Ray, and whether the cluster has it: pure functions over resource counts.

CPU shares are a means of placement only (Ray does not enforce them), so small machines get small shares:
all that is configured fits, and at least as much again stays free for replicas added while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cluster.config import GatewayConfig, PoolConfig

BRAIN_CPUS = 0.05
"""CPUs that a brain asks: it waits for its ranks and for the network most of the time."""
GATEWAY_CPUS = 0.05
_QUANTUM = 1e-4
"""Ray counts resources in units of 1/10000."""


class ReplicaDemand(NamedTuple):
    """One replica of a pool: what its brain and its stages ask, all on one node unless `may_spread`."""

    pool: str
    bundles: tuple[dict[str, float], ...]
    may_spread: bool = False

    def total(self) -> dict[str, float]:
        return _sum(self.bundles)

    def parts(self) -> list[dict[str, float]]:
        """What must each be on one node."""
        return [dict(bundle) for bundle in self.bundles] if self.may_spread else [self.total()]


def plan_cpus(
    pools: Sequence[PoolConfig], num_gateways: int, nodes: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """CPUs per rank for each pool. A pool that names its own keeps it; the others share what is left.

    A share is at most the rank's threads, and small enough that everything fits and that the pools which
    share can be doubled while they run. `nodes` are what each node has left.
    """
    num_cpus = sum(node.get("CPU", 0.0) for node in nodes)
    fixed = num_gateways * GATEWAY_CPUS
    num_auto = 0
    for pool in pools:
        fixed += pool.replicas * BRAIN_CPUS
        if pool.cpus_per_rank is None:
            num_auto += pool.replicas * pool.num_ranks
            fixed += pool.replicas * BRAIN_CPUS  # of the replica added later
        else:
            fixed += pool.replicas * pool.num_ranks * pool.cpus_per_rank
    share = max((num_cpus - fixed) / max(2 * num_auto, 1), 0.0)
    return {
        pool.name: pool.cpus_per_rank
        if pool.cpus_per_rank is not None
        else max(_floor(min(share, float(pool.engine.num_threads))), _QUANTUM)
        for pool in pools
    }


def rank_resources(pool: PoolConfig, cpus_per_rank: float, stage: int) -> dict[str, float]:
    """What one rank of the stage asks."""
    resources = {"CPU": cpus_per_rank}
    if pool.stage_devices[stage] == "cuda":
        resources["GPU"] = pool.num_gpus_per_rank
    return resources


def bundles(pool: PoolConfig, cpus_per_rank: float) -> list[dict[str, float]]:
    """The placement group of one replica: the brain's bundle first, then one for each stage, whose ranks
    share a node because they share the bundle."""
    stages = (rank_resources(pool, cpus_per_rank, stage) for stage in range(pool.pp))
    whole = ({name: pool.tp * amount for name, amount in rank.items()} for rank in stages)
    return [bundle | pool.resources for bundle in ({"CPU": BRAIN_CPUS}, *whole)]


def gateway_bundle(gateway: GatewayConfig) -> dict[str, float]:
    """What one gateway asks."""
    return {"CPU": GATEWAY_CPUS} | gateway.resources


def placement_strategy(pool: PoolConfig) -> str:
    """A replica of one stage stays on one node; stages are packed, and spread only where they must."""
    return "STRICT_PACK" if pool.pp == 1 else "PACK"


def demands(pools: Sequence[PoolConfig], cpus: Mapping[str, float]) -> list[ReplicaDemand]:
    """Every replica of every pool."""
    return [
        ReplicaDemand(pool.name, tuple(bundles(pool, cpus[pool.name])), may_spread=pool.pp > 1)
        for pool in pools
        for _ in range(pool.replicas)
    ]


def shortages(
    wanted: Sequence[ReplicaDemand],
    free: Sequence[Mapping[str, float]],
    total: Sequence[Mapping[str, float]],
) -> list[str]:
    """Why `wanted` cannot be placed on nodes with `free` of `total` resources; empty when it can.

    Each replica, or each stage of one that may spread, must fit on one node; the largest are placed first,
    each on the first node with room.
    """
    lines = [
        f"{name}: {_number(amount)} wanted, {_number(_sum(free).get(name, 0.0))} free of "
        f"{_number(_sum(total).get(name, 0.0))} in the cluster"
        for name, amount in sorted(_sum([demand.total() for demand in wanted]).items())
        if amount > _sum(free).get(name, 0.0) + _QUANTUM / 2
    ]
    return lines or _misfits(wanted, free)


def _misfits(wanted: Sequence[ReplicaDemand], free: Sequence[Mapping[str, float]]) -> list[str]:
    left = [dict(node) for node in free]
    lines = []
    parts = [(demand, part) for demand in wanted for part in demand.parts()]
    for demand, part in sorted(parts, key=lambda pair: sorted(pair[1].items()), reverse=True):
        node = next((node for node in left if _fits(part, node)), None)
        if node is None:
            asked = ", ".join(f"{name}: {_number(amount)}" for name, amount in sorted(part.items()))
            what = "stage" if demand.may_spread else "replica"
            lines.append(f"pool {demand.pool}: no single node has {asked} left for one {what}")
            continue
        for name, amount in part.items():
            node[name] -= amount
    return list(dict.fromkeys(lines))


def _fits(total: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(amount <= node.get(name, 0.0) + _QUANTUM / 2 for name, amount in total.items())


def _sum(resources: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in resources:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _floor(cpus: float) -> float:
    return math.floor(cpus / _QUANTUM + 1e-6) * _QUANTUM


def _number(amount: float) -> str:
    return f"{amount:.4f}".rstrip("0").rstrip(".")
