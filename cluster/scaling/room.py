"""Whether more replicas would fit: what the Ray cluster has free, and what a replica of a pool takes.

Ray's dashboard lists nodes with all they have, placement groups and actors with what they take; the
difference is free. A pool that has no replica now has no known size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from cluster.capacity import ReplicaDemand, shortages
from cluster.errors import DashboardError
from cluster.scaling.lever import Lever, deployment_name

_LIMIT = 10_000
_ONE_STAGE = 2
"""Bundles of a replica of one stage: the brain's and the stage's, which share a node."""
_HIDDEN = ("node:", "memory", "object_store_memory", "bundle")
"""Resources that no replica of ours asks, or that Ray makes of others."""


class Room(NamedTuple):
    """Resources by node, and what one replica of each pool takes, a mapping for each bundle."""

    free: tuple[dict[str, float], ...]
    total: tuple[dict[str, float], ...]
    bundles: dict[str, tuple[dict[str, float], ...]]

    def shortages(self, added: Mapping[str, int]) -> list[str]:
        """Why so many more replicas of each pool cannot be placed; empty when they can, or none knows."""
        wanted = [
            ReplicaDemand(pool, self.bundles[pool], may_spread=len(self.bundles[pool]) > _ONE_STAGE)
            for pool, num in added.items()
            if pool in self.bundles
            for _ in range(num)
        ]
        return shortages(wanted, self.free, self.total)

    def needed(self, pool: str, num: int) -> dict[str, float]:
        """What `num` replicas of the pool take; empty when that is not known."""
        needed: dict[str, float] = {}
        for bundle in self.bundles.get(pool, ()):
            for name, amount in bundle.items():
                needed[name] = needed.get(name, 0.0) + num * amount
        return needed

    def total_free(self, name: str) -> float:
        return sum(node.get(name, 0.0) for node in self.free)


async def read_room(lever: Lever, app: str) -> Room | None:
    """Asked of the dashboard; None when it cannot tell."""
    try:
        nodes = await _list(lever, "nodes")
        groups = await _list(lever, "placement_groups")
        actors = await _list(lever, "actors")
    except (DashboardError, msgspec.MsgspecError):
        return None
    return make_room(app, nodes, groups, actors)


def make_room(
    app: str, nodes: list[dict[str, Any]], groups: list[dict[str, Any]], actors: list[dict[str, Any]]
) -> Room:
    """From the rows of Ray's state API."""
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
    return Room(tuple(free.values()), tuple(total.values()), bundles)


async def _list(lever: Lever, what: str) -> list[dict[str, Any]]:
    answer = msgspec.json.decode(await lever.get(f"/api/v0/{what}?detail=1&limit={_LIMIT}"), type=_Answer)
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
