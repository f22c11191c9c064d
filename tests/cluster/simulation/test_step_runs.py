"""Steps that are done in runs change nothing of what happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated_runs import ENGINE, Log, log_of, offer, settled, simulated_cluster
from slow_cases import examples, slow_but

from cluster.simulation.gateway_end import PassedSteps
from cluster.simulation.simulated_cluster import ClusterShape, SimulatedCluster
from cluster.simulation.simulated_replica import SimulatedEngine
from kvtransfer.kv_events import KvEvents
from workers.messages.link import LinkUp, StepFrame, TokenDelta

BOTH = ("both",) * 3
SPLIT = ("prefill", "prefill", "decode", "decode")


class Listener:
    """A gateway without requests: it hears what every replica reports of its load and of its blocks."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.heard: list[tuple[object, ...]] = []
        self._clock = cluster.clock
        for replica in cluster.replicas:
            arrive = partial(self._arrive, replica.identity.replica_id)
            replica.connect(("listener", 1), arrive, self)

    def streamed(self, delta: TokenDelta, at: float, passed: PassedSteps | None) -> None:
        raise AssertionError("it has no requests")

    def _arrive(self, replica_id: str, message: LinkUp) -> None:
        if isinstance(message, StepFrame):
            self.heard.append((self._clock.now(), replica_id, message.load, message.queue))
        elif isinstance(message, KvEvents):
            self.heard.append((self._clock.now(), replica_id, message))


class Ran(NamedTuple):
    """What happened to requests, what replicas reported and when, and how many steps and preemptions all
    replicas had."""

    log: Log
    heard: list[tuple[object, ...]]
    num_steps: int
    num_preemptions: int


def ran(
    roles: tuple[str, ...],
    rate_s: float,
    seed: int,
    *,
    skips: bool,
    num_gateways: int = 1,
    engine: SimulatedEngine = ENGINE,
    until_s: float = 8.0,
    disturb: Callable[[SimulatedCluster], None] = lambda cluster: None,
) -> tuple[Ran, int]:
    """Return what happened, and how many events that took."""
    shape = ClusterShape([(role, engine) for role in roles], num_gateways=num_gateways, skips=skips)
    cluster = simulated_cluster(shape)
    listener = Listener(cluster)
    offer(cluster, rate_s, until_s, seed)
    disturb(cluster)
    records = settled(cluster, until_s + 4.0)
    assert records
    num_steps = sum(replica.steps.num_steps for replica in cluster.replicas)
    num_preemptions = sum(replica.scheduler.life.num_preemptions for replica in cluster.replicas)
    return Ran(log_of(records), listener.heard, num_steps, num_preemptions), cluster.events.num_events


@pytest.mark.parametrize("num_gateways", slow_but([1, 2], 2))
@pytest.mark.parametrize("roles", slow_but([BOTH, SPLIT], SPLIT))
def test_equal_logs_with_fewer_events(roles: tuple[str, ...], num_gateways: int) -> None:
    in_runs, num_events = ran(roles, 3.0, 1, skips=True, num_gateways=num_gateways)
    one_by_one, num_more = ran(roles, 3.0, 1, skips=False, num_gateways=num_gateways)
    assert in_runs == one_by_one
    assert num_events < 0.7 * num_more


def test_equal_logs_where_requests_wait_in_gateways() -> None:
    in_runs, _ = ran(("both",), 16.0, 2, skips=True)
    one_by_one, _ = ran(("both",), 16.0, 2, skips=False)
    assert in_runs == one_by_one


def test_equal_logs_where_an_objective_sizes_chunks() -> None:
    engine = ENGINE._replace(tpot_objective_s=0.012)
    in_runs, _ = ran(("both",), 6.0, 5, skips=True, engine=engine)
    one_by_one, _ = ran(("both",), 6.0, 5, skips=False, engine=engine)
    assert in_runs == one_by_one
    assert in_runs.num_steps > ran(("both",), 6.0, 5, skips=True)[0].num_steps, "no chunk was shorter"


def test_equal_logs_where_blocks_are_few() -> None:
    engine = ENGINE._replace(num_blocks=160, block_tokens=16)
    in_runs, num_events = ran(("both",), 8.0, 9, skips=True, engine=engine, until_s=3.0)
    one_by_one, num_more = ran(("both",), 8.0, 9, skips=False, engine=engine, until_s=3.0)
    assert in_runs == one_by_one
    assert in_runs.num_preemptions
    assert num_events < num_more


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

    in_runs, _ = ran(roles, 12.0, 3, skips=True, disturb=disturb)
    one_by_one, _ = ran(roles, 12.0, 3, skips=False, disturb=disturb)
    assert in_runs == one_by_one
    assert any(entry[8] == 2 for entry in in_runs.log), "nothing was tried again"


def test_equal_logs_when_streams_move() -> None:
    def disturb(cluster: SimulatedCluster) -> None:
        replica = cluster.find("r0001")
        assert replica is not None
        cluster.events.at(3.0, lambda: replica.set_role("prefill", 1))

    in_runs, _ = ran(BOTH, 6.0, 4, skips=True, disturb=disturb)
    one_by_one, _ = ran(BOTH, 6.0, 4, skips=False, disturb=disturb)
    assert in_runs == one_by_one
    assert any(entry[9] for entry in in_runs.log), "no stream moved"


@pytest.mark.slow
@settings(max_examples=examples(15), deadline=None)
@given(
    roles=st.sampled_from([BOTH, SPLIT, ("both",), ("prefill", "decode")]),
    rate_s=st.floats(0.5, 30.0),
    seed=st.integers(0, 1 << 16),
    num_gateways=st.integers(1, 3),
    num_kv_tokens=st.sampled_from([10_000, 20_000, 128_000]),
    block_tokens=st.sampled_from([16, 64]),
    max_batch_tokens=st.sampled_from([256, 2048]),
)
def test_equal_logs_of_any_cluster(
    roles: tuple[str, ...],
    rate_s: float,
    seed: int,
    num_gateways: int,
    num_kv_tokens: int,
    block_tokens: int,
    max_batch_tokens: int,
) -> None:
    until_s = 5.0
    assume(random.Random(seed).expovariate(rate_s) < until_s)  # when the first request arrives

    def disturb(cluster: SimulatedCluster) -> None:
        source = random.Random(seed)
        for replica in cluster.replicas[1:]:
            if replica.role == "both":
                role, at = source.choice(("prefill", "both")), 1.0 + 8.0 * source.random()
                cluster.events.at(at, lambda it=replica, role=role: it.set_role(role, 1))  # type: ignore[misc]

    engine = ENGINE._replace(
        num_blocks=num_kv_tokens // block_tokens, block_tokens=block_tokens, max_batch_tokens=max_batch_tokens
    )
    simulate = partial(
        ran, roles, rate_s, seed, num_gateways=num_gateways, engine=engine, until_s=until_s, disturb=disturb
    )
    assert simulate(skips=True)[0] == simulate(skips=False)[0]
