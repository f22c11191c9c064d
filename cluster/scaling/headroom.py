"""Find whether more replicas would fit: the free resources of the Ray cluster, and the size of a replica.

Ray's dashboard lists nodes with all they have, placement groups and actors with what they take; the
difference is free. A pool that has no replica now has no known size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from cluster.errors import DashboardError
from cluster.scaling.resource_demand import ReplicaDemand, add_up, shortages
from cluster.scaling.serve_client import ServeClient, deployment_name

_LIMIT = 10_000
# Bundles of a replica of one stage: the engine core's and the stage's, which share a node.
_ONE_STAGE = 2
# Resources that no replica requests, or that Ray derives from others.
_HIDDEN = ("node:", "memory", "object_store_memory", "bundle")


class Headroom(NamedTuple):
    """Represents the resources by node, and the resources of one replica of each pool, a mapping for each
    bundle."""

    free: tuple[dict[str, float], ...]
    total: tuple[dict[str, float], ...]
    bundles: dict[str, tuple[dict[str, float], ...]]

    def shortages(self, added: Mapping[str, int]) -> list[str]:
        """Return why this many more replicas of each pool cannot be placed; empty when they can, or it is
        unknown."""
        wanted = [
            ReplicaDemand(pool, self.bundles[pool], may_spread=len(self.bundles[pool]) > _ONE_STAGE)
            for pool, num in added.items()
            if pool in self.bundles
            for _ in range(num)
        ]
        return shortages(wanted, self.free, self.total)

    def needed(self, pool: str, num: int) -> dict[str, float]:
        """Return the resources that `num` replicas of the pool take; empty when they are not known."""
        return {name: num * amount for name, amount in add_up(self.bundles.get(pool, ())).items()}

    def total_free(self, name: str) -> float:
        """Return the free amount of one resource on all nodes."""
        return sum(node.get(name, 0.0) for node in self.free)

    def free_amounts(self) -> dict[str, float]:
        """Return the free amounts on all nodes, by each resource that any of them has."""
        return {
            name: self.total_free(name) for name in sorted({name for node in self.total for name in node})
        }


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
