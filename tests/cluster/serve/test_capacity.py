"""What is asked of Ray: always less than there is, and a shortage names its resource."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PoolConfig
from cluster.scaling.resource_demand import ReplicaDemand, shortages
from cluster.serve.capacity import (
    ENGINE_CORE_CPUS,
    GATEWAY_CPUS,
    bundles,
    demands,
    placement_strategy,
    plan_cpus,
)

GATEWAY = ReplicaDemand("gateway", ({"CPU": GATEWAY_CPUS},))


def pool(name: str, **fields: Any) -> PoolConfig:
    return PoolConfig.model_validate({"name": name, "role": "both", **fields})


def test_two_cores_hold_the_default_shape_twice() -> None:
    pools = [pool("prefill"), pool("decode")]
    nodes = [{"CPU": 2.0}]
    cpus = plan_cpus(pools, 1, nodes)
    assert cpus["prefill"] == cpus["decode"]
    assert 0.4 < cpus["decode"] < 0.5
    assert shortages([*demands(pools, cpus), GATEWAY, *demands(pools, cpus)], nodes, nodes) == []


def test_a_named_share_is_kept_and_the_rest_divided() -> None:
    cpus = plan_cpus([pool("fixed", cpus_per_rank=1.5), pool("auto")], 0, [{"CPU": 2.0}])
    assert cpus["fixed"] == 1.5
    assert cpus["auto"] == pytest.approx((2.0 - 1.5 - 3 * ENGINE_CORE_CPUS) / 2)


def test_a_share_is_not_more_than_the_threads() -> None:
    cpus = plan_cpus([pool("p", engine={"num_threads": 4})], 0, [{"CPU": 64.0}])
    assert cpus["p"] == 4.0


@given(
    num_cpus=st.integers(1, 256),
    replicas=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    threads=st.integers(1, 32),
)
def test_what_is_asked_never_exceeds_what_there_is(num_cpus: int, replicas: list[int], threads: int) -> None:
    pools = [
        pool(f"p{index}", replicas=count, engine={"num_threads": threads})
        for index, count in enumerate(replicas)
    ]
    nodes = [{"CPU": float(num_cpus)}]
    cpus = plan_cpus(pools, 1, nodes)
    asked = sum(amount for demand in demands(pools, cpus) for amount in demand.total().values())
    fixed = GATEWAY_CPUS + ENGINE_CORE_CPUS * sum(replicas)
    assert all(share > 0 for share in cpus.values())
    if fixed < num_cpus:
        assert asked + GATEWAY_CPUS <= num_cpus + 1e-2


def test_a_missing_gpu_is_named_with_its_count() -> None:
    pools = [pool("decode", replicas=2, device="cuda")]
    nodes = [{"CPU": 8.0, "memory": 1e9}]
    lines = shortages(demands(pools, plan_cpus(pools, 0, nodes)), nodes, nodes)
    assert lines == ["GPU: 2 wanted, 0 free of 0 in the cluster"]


def test_resources_in_use_are_distinguished_from_resources_there() -> None:
    pools = [pool("decode", cpus_per_rank=2)]
    lines = shortages(demands(pools, {"decode": 2.0}), [{"CPU": 0.5}], [{"CPU": 4.0}])
    assert lines == ["CPU: 2.05 wanted, 0.5 free of 4 in the cluster"]


def test_a_replica_does_not_span_nodes() -> None:
    demand = demands([pool("big", cpus_per_rank=3)], {"big": 3.0})
    nodes = [{"CPU": 2.0}, {"CPU": 2.0}]
    assert shortages(demand, nodes, nodes) == ["pool big: no single node has CPU: 3.05 left for one replica"]


def test_large_replicas_are_placed_before_small_ones() -> None:
    pools = [pool("small", replicas=2, cpus_per_rank=1), pool("large", cpus_per_rank=3)]
    nodes = [{"CPU": 3.1}, {"CPU": 2.2}]
    assert shortages(demands(pools, {"small": 1.0, "large": 3.0}), nodes, nodes) == []


def test_bundles_are_the_engine_core_then_its_stages() -> None:
    assert bundles(pool("g", device="cuda"), 0.5) == [{"CPU": ENGINE_CORE_CPUS}, {"CPU": 0.5, "GPU": 1.0}]
    assert bundles(pool("c"), 0.5) == [{"CPU": ENGINE_CORE_CPUS}, {"CPU": 0.5}]
    split = pool("s", tp=2, pp=2, devices=["cuda", "cpu"])
    assert bundles(split, 0.5) == [{"CPU": ENGINE_CORE_CPUS}, {"CPU": 1.0, "GPU": 2.0}, {"CPU": 1.0}]


def test_stages_may_be_on_several_nodes_but_not_the_ranks_of_one() -> None:
    wide, deep = pool("wide", tp=4, cpus_per_rank=1), pool("deep", tp=2, pp=2, cpus_per_rank=1)
    nodes = [{"CPU": 2.1}, {"CPU": 2.1}]
    assert shortages(demands([deep], {"deep": 1.0}), nodes, nodes) == []
    assert shortages(demands([wide], {"wide": 1.0}), nodes, nodes) == [
        "pool wide: no single node has CPU: 4.05 left for one replica"
    ]
    assert (placement_strategy(wide), placement_strategy(deep)) == ("STRICT_PACK", "PACK")
