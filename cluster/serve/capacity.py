"""What the processes ask of Ray, and whether the cluster has it: pure functions over resource counts.

CPU shares are a means of placement only (Ray does not enforce them), so small machines get small shares:
all that is configured fits, and at least as much again stays free for replicas added while it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cluster.config import GatewayConfig, PoolConfig
from cluster.errors import DashboardError
from cluster.scaling.serve_client import ServeClient, deployment_name

# CPUs that an engine core asks: it waits for its ranks and for the network most of the time.
ENGINE_CORE_CPUS = 0.05
GATEWAY_CPUS = 0.05
# Ray counts resources in units of 1/10000.
_QUANTUM = 1e-4


class ReplicaDemand(NamedTuple):
    """Represents one replica of a pool: what its engine core and its stages ask, on one node unless
    `may_spread`."""

    pool: str
    bundles: tuple[dict[str, float], ...]
    may_spread: bool = False

    def total(self) -> dict[str, float]:
        """Return what all of it asks."""
        return add_up(self.bundles)

    def parts(self) -> list[dict[str, float]]:
        """Return the parts that must each be on one node."""
        return [dict(bundle) for bundle in self.bundles] if self.may_spread else [self.total()]


def plan_cpus(
    pools: Sequence[PoolConfig], num_gateways: int, nodes: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the CPUs per rank for each pool. A pool that configures its own keeps it; the others share what
    is left.

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
            fixed += pool.replicas * ENGINE_CORE_CPUS  # of the replica added later
        else:
            fixed += pool.replicas * pool.num_ranks * pool.cpus_per_rank
    share = max((num_cpus - fixed) / max(2 * num_auto, 1), 0.0)
    return {
        pool.name: pool.cpus_per_rank
        if pool.cpus_per_rank is not None
        else max(math.floor(min(share, pool.engine.num_threads) / _QUANTUM + 1e-6) * _QUANTUM, _QUANTUM)
        for pool in pools
    }


def rank_resources(pool: PoolConfig, cpus_per_rank: float, stage: int) -> dict[str, float]:
    """Return what one rank of the stage asks."""
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
    """Return what one gateway asks."""
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


def add_up(resources: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each resource."""
    sums: dict[str, float] = {}
    for part in resources:
        for name, amount in part.items():
            sums[name] = sums.get(name, 0.0) + amount
    return sums


def amount_text(amount: float) -> str:
    """Return `0.05` for 0.0500."""
    return f"{amount:.4f}".rstrip("0").rstrip(".")


def shortages(
    wanted: Sequence[ReplicaDemand],
    free: Sequence[Mapping[str, float]],
    total: Sequence[Mapping[str, float]],
) -> list[str]:
    """Return why `wanted` cannot be placed on nodes with `free` of `total` resources; empty when it can.

    Each replica, or each stage of one that may spread, must fit on one node; the largest are placed first,
    each on the first node where it fits.
    """
    lines = [
        f"{name}: {amount_text(amount)} wanted, {amount_text(add_up(free).get(name, 0.0))} free of "
        f"{amount_text(add_up(total).get(name, 0.0))} in the cluster"
        for name, amount in sorted(add_up([demand.total() for demand in wanted]).items())
        if amount > add_up(free).get(name, 0.0) + _QUANTUM / 2
    ]
    return lines or _misfits(wanted, free)


def _misfits(wanted: Sequence[ReplicaDemand], free: Sequence[Mapping[str, float]]) -> list[str]:
    left = [dict(node) for node in free]
    lines = []
    parts = [(demand, part) for demand in wanted for part in demand.parts()]
    for demand, part in sorted(parts, key=lambda pair: sorted(pair[1].items()), reverse=True):
        node = next((node for node in left if _fits(part, node)), None)
        if node is None:
            asked = ", ".join(f"{name}: {amount_text(amount)}" for name, amount in sorted(part.items()))
            what = "stage" if demand.may_spread else "replica"
            lines.append(f"pool {demand.pool}: no single node has {asked} left for one {what}")
            continue
        for name, amount in part.items():
            node[name] -= amount
    return list(dict.fromkeys(lines))


def _fits(total: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(amount <= node.get(name, 0.0) + _QUANTUM / 2 for name, amount in total.items())


# ----------------------------------------------------------------------------------------------
# Whether more replicas would fit: what the Ray cluster has free, and what a replica of a pool takes.
#
# Ray's dashboard lists nodes with all they have, placement groups and actors with what they take; the
# difference is free. A pool that has no replica now has no known size.

_LIMIT = 10_000
# Bundles of a replica of one stage: the engine core's and the stage's, which share a node.
_ONE_STAGE = 2
# Resources that no replica asks, or that Ray derives from others.
_HIDDEN = ("node:", "memory", "object_store_memory", "bundle")


class Headroom(NamedTuple):
    """Represents the resources by node, and what one replica of each pool takes, a mapping for each
    bundle."""

    free: tuple[dict[str, float], ...]
    total: tuple[dict[str, float], ...]
    bundles: dict[str, tuple[dict[str, float], ...]]

    def shortages(self, added: Mapping[str, int]) -> list[str]:
        """Return why so many more replicas of each pool cannot be placed; empty when they can, or it is
        unknown."""
        wanted = [
            ReplicaDemand(pool, self.bundles[pool], may_spread=len(self.bundles[pool]) > _ONE_STAGE)
            for pool, num in added.items()
            if pool in self.bundles
            for _ in range(num)
        ]
        return shortages(wanted, self.free, self.total)

    def needed(self, pool: str, num: int) -> dict[str, float]:
        """Return what `num` replicas of the pool take; empty when that is not known."""
        return {name: num * amount for name, amount in add_up(self.bundles.get(pool, ())).items()}

    def total_free(self, name: str) -> float:
        """Return what all nodes have free of one resource."""
        return sum(node.get(name, 0.0) for node in self.free)


async def read_headroom(client: ServeClient, app: str) -> Headroom | None:
    """Read the headroom from the dashboard; None when it does not answer."""
    try:
        nodes = await _list(client, "nodes")
        groups = await _list(client, "placement_groups")
        actors = await _list(client, "actors")
    except (DashboardError, msgspec.MsgspecError):
        return None
    return make_headroom(app, nodes, groups, actors)


def make_headroom(
    app: str, nodes: list[dict[str, Any]], groups: list[dict[str, Any]], actors: list[dict[str, Any]]
) -> Headroom:
    """Compute the headroom from the rows of Ray's state API."""
    total = {node["node_id"]: _shown(node["resources_total"]) for node in nodes if node["state"] == "ALIVE"}
    free = {node_id: dict(resources) for node_id, resources in total.items()}
    bundles: dict[str, tuple[dict[str, float], ...]] = {}
    for group in groups:
        if group["state"] not in ("CREATED", "RESCHEDULING"):
            continue
        parts = tuple(_shown(bundle["unit_resources"]) for bundle in group["bundles"] or ())
        for bundle, part in zip(group["bundles"] or (), parts, strict=True):
            _take(free, bundle.get("node_id"), part)
        if found := re.search(
            rf"{re.escape(app)}#{re.escape(deployment_name(''))}([a-z0-9-]+)#", group["name"]
        ):
            bundles[found[1]] = parts
    for actor in actors:
        if actor["state"] == "ALIVE" and not actor.get("placement_group_id"):
            _take(free, actor.get("node_id"), _shown(actor.get("required_resources") or {}))
    return Headroom(tuple(free.values()), tuple(total.values()), bundles)


async def _list(client: ServeClient, what: str) -> list[dict[str, Any]]:
    answer = msgspec.json.decode(await client.get(f"/api/v0/{what}?detail=1&limit={_LIMIT}"), type=_Answer)
    return answer.data.result.result


class _Rows(msgspec.Struct):
    result: list[dict[str, Any]]


class _Data(msgspec.Struct):
    result: _Rows


class _Answer(msgspec.Struct):
    data: _Data


def _shown(resources: Mapping[str, float]) -> dict[str, float]:
    return {
        name: float(amount) for name, amount in resources.items() if amount and not name.startswith(_HIDDEN)
    }


def _take(free: dict[str, dict[str, float]], node_id: str | None, taken: Mapping[str, float]) -> None:
    node = free.get(node_id or "")
    if node is not None:
        for name, amount in taken.items():
            node[name] = node.get(name, 0.0) - amount
