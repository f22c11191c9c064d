"""Simulated clusters are scaled by the scaler that serves; replicas start, drain, change roles and go."""

from __future__ import annotations

import random

import pytest
from simulated_runs import ENGINE, Log, log_of, offer, settled, simulated_cluster, tokens
from slow_cases import slow_but

from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.reconciler import Reconciler
from cluster.scaling.scaler import Scaler
from cluster.simulation.simulated_call import CallRecord, SimulatedRequest
from cluster.simulation.simulated_cluster import ClusterShape, SimulatedCluster
from cluster.simulation.simulated_scaling import PlannedScaling, SimulatedScaling
from cluster.simulation.simulated_serve import ReplicaTimes

PAIR = [("prefill", ENGINE), ("decode", ENGINE)]
# Slow enough that a few requests a second need several replicas.
SLOW = ENGINE._replace(steps=ENGINE.steps._replace(token_s=5e-4), max_sequences=8)
SLOW_PAIR = [("prefill", SLOW), ("decode", SLOW)]


def scaling(least: int = 1, **settings: object) -> PlannedScaling:
    """Return scaling of both pools up to 4 replicas that start in 3 s, with short memories."""
    limits = PoolLimits(min=least, max=4)
    defaults: dict[str, object] = {
        "autoscale": True,
        "pools": {"prefill": limits, "decode": limits},
        "forecast_s": 30.0,
        "up_cool_down_s": 3.0,
        "down_cool_down_s": 10.0,
        "interval_s": 1.0,
    }
    return PlannedScaling(ScalingConfig.model_validate(defaults | settings), ReplicaTimes(3.0))


def drained(cluster: SimulatedCluster, name: str) -> None:
    """Let a replica leave, and go when nothing runs there."""
    replica = cluster.find(name)
    assert replica is not None
    replica.drain(10.0, lambda: cluster.remove_replica(name))


def test_the_scaler_is_the_one_that_serves() -> None:
    cluster = simulated_cluster(ClusterShape(PAIR))
    scaled = SimulatedScaling(cluster, scaling())
    assert type(scaled._scaler) is Scaler
    assert type(scaled._scaler._reconciler) is Reconciler


def test_a_pool_grows_under_load_and_shrinks_after() -> None:
    cluster = simulated_cluster(ClusterShape(SLOW_PAIR))
    scaled = SimulatedScaling(cluster, scaling())
    offer(cluster, 5.0, 20.0, 2)
    cluster.events.run(20.0)
    grown = scaled.serve.targets["prefill"]
    assert grown > 1
    assert sum(replica.role == "prefill" for replica in cluster.replicas) > 1
    cluster.events.run(120.0)
    assert scaled.serve.targets == {"prefill": 1, "decode": 1}
    assert [replica.role for replica in cluster.replicas] == ["prefill", "decode"]
    assert all(record.is_good or record.refusal == "refused" for record in settled(cluster))
    # Replicas are paid from their order to their end.
    assert 2 * 119.0 < cluster.replica_s(1.0, 120.0) < 2 * 119.0 + (grown + 2) * 119.0
    assert {move.after > move.before for move in scaled.moves} == {True, False}


@pytest.mark.parametrize("name", ["r0000", "r0002"])
def test_no_request_is_lost_when_a_replica_drains(name: str) -> None:
    cluster = simulated_cluster(ClusterShape(2 * [PAIR[0]] + 2 * [PAIR[1]]))
    offer(cluster, 12.0, 8.0, 5, mean_output=200)
    cluster.events.at(4.0, lambda: drained(cluster, name))
    records = settled(cluster)
    assert all(record.is_good for record in records)
    assert cluster.find(name) is None
    (life,) = cluster.past
    assert life.ended_at < 14.1
    if name == "r0002":
        assert any(record.num_moves for record in records), "no stream moved away"


def test_a_replica_that_dies_is_replaced() -> None:
    cluster = simulated_cluster(ClusterShape([*PAIR, PAIR[1]]))
    SimulatedScaling(cluster, scaling(2))
    cluster.events.at(4.0, lambda: cluster.end_replica("r0002", "on purpose"))
    cluster.events.run(12.0)
    assert cluster.find("r0002") is None
    assert sum(replica.role == "decode" for replica in cluster.replicas) == 2


def roles_and_records(*, skips: bool = True) -> tuple[set[str], list[CallRecord], Log]:
    """Return the roles that replicas had, in a cluster that may not grow and first has prompts alone."""
    cluster = simulated_cluster(ClusterShape([SLOW_PAIR[0], *2 * [SLOW_PAIR[1]]], skips=skips))
    plan = scaling(autoscale=False, change_roles=True, role_change_after_s=3.0)
    scaled = SimulatedScaling(cluster, plan)
    offer(cluster, 9.0, 15.0, 4, mean_output=0)
    seen: set[str] = set()
    for at in range(2, 60):
        cluster.events.run(float(at))
        seen |= {f"{replica.pool_name} as {replica.role}" for replica in cluster.replicas}
    assert [replica.role for replica in cluster.replicas] == ["prefill", "decode", "decode"]
    moves = [(move.at, move.pool, move.reason) for move in scaled.moves]
    records = settled(cluster)
    return seen, records, [*log_of(records), *moves]


def test_an_idle_replica_takes_the_other_role_and_returns() -> None:
    seen, records, _ = roles_and_records()
    assert "decode as prefill" in seen
    assert all(record.is_good or record.refusal == "refused" for record in records)


def test_scale_to_zero_and_back() -> None:
    cluster = simulated_cluster(ClusterShape(PAIR))
    scaled = SimulatedScaling(cluster, scaling(0, zero_after_s=10.0))
    cluster.events.run(20.0)
    assert scaled.serve.targets == {"prefill": 0, "decode": 0}
    assert cluster.replicas == []
    record = cluster.arrive(SimulatedRequest(tokens(random.Random(0), 500), 20))
    cluster.events.run(29.0)
    assert record.is_good
    # A look, a start, and what is left of a pause until the gateway tries again.
    assert 3.0 < record.ttft_s < 8.0
    cluster.events.run(50.0)
    assert cluster.replicas == []
    cluster.check()


def scaled_log(*, skips: bool, num_gateways: int) -> Log:
    """Return what became of the requests, and every move with its reason."""
    cluster = simulated_cluster(ClusterShape(SLOW_PAIR, num_gateways=num_gateways, skips=skips))
    scaled = SimulatedScaling(cluster, scaling(itl_slo_s=0.0061))
    offer(cluster, 3.0, 25.0, 3)
    cluster.events.run(60.0)
    moves = [(move.at, move.pool, move.before, move.after, move.reason) for move in scaled.moves]
    assert len(moves) >= 3
    return [*log_of(settled(cluster)), *moves]


@pytest.mark.parametrize("num_gateways", slow_but([1, 2], 1))
def test_equal_logs_with_and_without_runs_of_steps(num_gateways: int) -> None:
    in_runs = scaled_log(skips=True, num_gateways=num_gateways)
    assert in_runs == scaled_log(skips=False, num_gateways=num_gateways)


@pytest.mark.slow
def test_equal_logs_when_roles_change() -> None:
    assert roles_and_records()[2] == roles_and_records(skips=False)[2]
