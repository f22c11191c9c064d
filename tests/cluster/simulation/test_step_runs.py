"""Steps that are done in runs change nothing of what happens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import ENGINE, Log, log_of, offer, settled, simulated_cluster
from slow_cases import examples, slow_but

from cluster.simulation.simulated_cluster import ClusterShape, SimulatedCluster
from cluster.simulation.simulated_replica import SimulatedEngine

BOTH = ("both",) * 3
SPLIT = ("prefill", "prefill", "decode", "decode")


def steps_and_log(
    roles: tuple[str, ...],
    rate_s: float,
    seed: int,
    *,
    skips: bool,
    num_gateways: int = 1,
    disturb: Callable[[SimulatedCluster], None] = lambda cluster: None,
    engine: SimulatedEngine = ENGINE,
) -> tuple[int, Log, int]:
    """Return the steps of all replicas, what happened, and how many events that took."""
    shape = ClusterShape([(role, engine) for role in roles], num_gateways=num_gateways, skips=skips)
    cluster = simulated_cluster(shape)
    offer(cluster, rate_s, 8.0, seed)
    disturb(cluster)
    records = settled(cluster)
    assert records
    num_steps = sum(replica.steps.num_steps for replica in cluster.replicas)
    return num_steps, log_of(records), cluster.events.num_events


@pytest.mark.parametrize("num_gateways", slow_but([1, 2], 2))
@pytest.mark.parametrize("roles", slow_but([BOTH, SPLIT], SPLIT))
def test_equal_logs_with_fewer_events(roles: tuple[str, ...], num_gateways: int) -> None:
    *in_runs, num_events = steps_and_log(roles, 3.0, 1, skips=True, num_gateways=num_gateways)
    *one_by_one, num_more = steps_and_log(roles, 3.0, 1, skips=False, num_gateways=num_gateways)
    assert in_runs == one_by_one
    assert num_events < 0.7 * num_more


def test_equal_logs_where_requests_wait_in_gateways() -> None:
    *in_runs, _ = steps_and_log(("both",), 16.0, 2, skips=True)
    *one_by_one, _ = steps_and_log(("both",), 16.0, 2, skips=False)
    assert in_runs == one_by_one


def test_equal_logs_where_an_objective_sizes_chunks() -> None:
    engine = ENGINE._replace(tpot_objective_s=0.012)
    num_steps, log, _ = steps_and_log(("both",), 6.0, 5, skips=True, engine=engine)
    *one_by_one, _ = steps_and_log(("both",), 6.0, 5, skips=False, engine=engine)
    assert [num_steps, log] == one_by_one
    assert num_steps > steps_and_log(("both",), 6.0, 5, skips=True)[0], "no chunk was shorter"


@pytest.mark.parametrize("roles", slow_but([BOTH, SPLIT], BOTH))
def test_equal_logs_when_a_replica_dies_and_comes_back(roles: tuple[str, ...]) -> None:
    def disturb(cluster: SimulatedCluster) -> None:
        def end_busiest() -> None:
            able = [replica for replica in cluster.replicas if replica.role != "prefill"]
            busiest = max(able, key=lambda replica: len(replica.table))
            name = busiest.identity.replica_id
            cluster.end_replica(name, "on purpose")
            cluster.events.after(2.0, lambda: cluster.add_replica(name, busiest.role, ENGINE))

        cluster.events.at(3.01, end_busiest)

    num_steps, log, _ = steps_and_log(roles, 12.0, 3, skips=True, disturb=disturb)
    *one_by_one, _ = steps_and_log(roles, 12.0, 3, skips=False, disturb=disturb)
    assert [num_steps, log] == one_by_one
    assert any(entry[8] == 2 for entry in log), "nothing was tried again"


def test_equal_logs_when_streams_move() -> None:
    def disturb(cluster: SimulatedCluster) -> None:
        replica = cluster.find("r0001")
        assert replica is not None
        cluster.events.at(3.0, lambda: replica.set_role("prefill", 1))

    num_steps, log, _ = steps_and_log(BOTH, 6.0, 4, skips=True, disturb=disturb)
    *one_by_one, _ = steps_and_log(BOTH, 6.0, 4, skips=False, disturb=disturb)
    assert [num_steps, log] == one_by_one
    assert any(entry[9] for entry in log), "no stream moved"


@pytest.mark.slow
@settings(max_examples=examples(15), deadline=None)
@given(
    roles=st.sampled_from([BOTH, SPLIT, ("both",), ("prefill", "decode")]),
    rate_s=st.floats(0.5, 30.0),
    seed=st.integers(0, 1 << 16),
    num_gateways=st.integers(1, 3),
)
def test_equal_logs_of_any_cluster(
    roles: tuple[str, ...], rate_s: float, seed: int, num_gateways: int
) -> None:
    def disturb(cluster: SimulatedCluster) -> None:
        source = random.Random(seed)
        for replica in cluster.replicas[1:]:
            if replica.role == "both":
                role, at = source.choice(("prefill", "both")), 1.0 + 8.0 * source.random()
                cluster.events.at(at, lambda it=replica, role=role: it.set_role(role, 1))  # type: ignore[misc]

    *in_runs, _ = steps_and_log(roles, rate_s, seed, skips=True, num_gateways=num_gateways, disturb=disturb)
    *one_by_one, _ = steps_and_log(
        roles, rate_s, seed, skips=False, num_gateways=num_gateways, disturb=disturb
    )
    assert in_runs == one_by_one
