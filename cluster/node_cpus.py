"""What the processors of all Ray nodes can do. Asked before the dtype of a cluster is settled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import PoolConfig
from cluster.errors import StartError
from kvtransfer.host import cpu_flags

_ANSWER_S = 60.0


def node_cpu_flags(pools: Sequence[PoolConfig]) -> dict[str, frozenset[str]]:
    """By address, the CPU flags of every node on which a CPU rank of these pools may be placed.

    Raises `StartError` for a node that does not answer.
    """
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if may_compute(pools, node)}
    here = ray.get_runtime_context().get_node_id()
    asked = {
        node_id: ray.remote(_flags)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote()
        for node_id in nodes
        if node_id != here
    }
    try:
        answers = dict(zip(asked, ray.get(list(asked.values()), timeout=_ANSWER_S), strict=True))
    except RayError as error:
        addresses = ", ".join(nodes[node_id] for node_id in asked)
        raise StartError(
            f"not every one of the nodes {addresses} says what its processors can do ({error}); name the "
            "dtype of the pools"
        ) from error
    return {
        nodes[node_id]: frozenset(answers[node_id]) if node_id in answers else cpu_flags()
        for node_id in nodes
    }


def may_compute(pools: Sequence[PoolConfig], node: dict[str, Any]) -> bool:
    """Whether a CPU rank of some pool may be placed on this entry of `ray.nodes()`."""
    resources = node["Resources"]
    return (
        node["Alive"]
        and resources.get("CPU", 0) > 0
        and any(
            all(resources.get(name, 0) > 0 for name in pool.resources)
            for pool in pools
            if "cpu" in pool.stage_devices
        )
    )


def _flags() -> list[str]:
    return sorted(cpu_flags())
