"""The simulated cluster is made of the classes that serve, keeps their promises, and agrees with theory."""

from __future__ import annotations

import random

import numpy as np
import pytest
from simulated_runs import ENGINE, offer, settled, simulated_cluster, tokens

from cluster.admission.admission import RequestAdmission
from cluster.gateway.request_state import RequestState
from cluster.simulation.simulated_call import SimulatedRequest
from cluster.simulation.simulated_cluster import ClusterShape, SimulatedCluster
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.step_model import StepModel
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.protocol.sender import SendTable
from router.service import RouterService
from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender
from workers.disagg.migration import MigrationManager
from workers.replica.engine_core import EngineCore
from workers.replica.engine_decisions import EngineDecisions
from workers.replica.gateway_links import GatewayLinks
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler

SPLIT = [("prefill", ENGINE), ("prefill", ENGINE), ("decode", ENGINE), ("decode", ENGINE)]


def test_what_decides_is_what_serves() -> None:
    cluster = simulated_cluster(ClusterShape(SPLIT))
    replica, gateway = cluster.replicas[0], cluster.gateways[0]
    parts = {
        Scheduler: replica.scheduler,
        BlockPool: replica.pool,
        StepLoop: replica.steps,
        KvSender: replica.kv_sender,
        KvReceiver: replica.kv_receiver,
        SendTable: replica.kv_sender.sends,
        LandingTable: replica.kv_receiver.landings,
        MigrationManager: replica.migration,
        GatewayLinks: replica._gateways,
        RouterService: gateway.router,
        RequestAdmission: gateway.admission,
    }
    for real, used in parts.items():
        assert type(used) is real
    # Both are the same decisions, and the simulated replica overrides none of them.
    assert issubclass(EngineCore, EngineDecisions)
    of_replica = {"wake", "pump", "fail", "set_role", "on_rank_message", "_end_ranks"}
    overridden = vars(type(replica)).keys() & vars(EngineDecisions).keys()
    own = {name for name in overridden if not name.startswith("__")}
    assert own <= of_replica, own - of_replica


def test_requests_use_the_state_machine_that_serves() -> None:
    cluster = simulated_cluster(ClusterShape(SPLIT))
    cluster.arrive(SimulatedRequest(tokens(random.Random(0), 100), 5))
    (call,) = cluster.gateways[0]._calls.values()
    assert type(call.state) is RequestState
    (record,) = settled(cluster)
    assert record.is_good


@pytest.mark.parametrize("roles", [SPLIT, [("both", ENGINE)] * 3])
def test_a_lone_request_takes_what_its_steps_take(roles: list[tuple[str, SimulatedEngine]]) -> None:
    cluster = simulated_cluster(ClusterShape(roles))
    cluster.arrive(SimulatedRequest(tokens(random.Random(0), 1000), 50))
    (record,) = settled(cluster)
    steps = ENGINE.steps
    prefill_s = steps.step_s(0, 0, [(0, 1000)])
    # To the replica and back, and for a hand-over the path, which is measured first, and the landing.
    assert prefill_s < record.ttft_s < prefill_s + (0.055 if roles is SPLIT else 0.002)
    decode_s = sum(steps.decode_s(1, 1000 + index) for index in range(49))
    assert record.ended_at is not None
    assert record.first_token_at is not None
    decoded_s = record.ended_at - record.first_token_at
    assert decode_s <= decoded_s + 1e-9 < decode_s + (0.03 if roles is SPLIT else 1e-6)


def test_what_a_request_takes_beside_steps_delays_it_and_no_step() -> None:
    ttfts_s, busy_s = [], []
    for request_s in (0.0, 0.25):
        cluster = simulated_cluster(ClusterShape([("both", ENGINE)], request_s=request_s))
        cluster.arrive(SimulatedRequest(tokens(random.Random(0), 1000), 50))
        assert cluster.num_running == 1
        (record,) = settled(cluster)
        ttfts_s.append(record.ttft_s)
        busy_s.append(cluster.replicas[0].ranks.busy_s)
    assert ttfts_s[1] == pytest.approx(ttfts_s[0] + 0.25)
    assert busy_s[1] == pytest.approx(busy_s[0])


def test_gateways_whose_links_are_cut_know_nothing_of_each_other_until_they_connect_again() -> None:
    cluster = simulated_cluster(ClusterShape([("both", ENGINE)] * 2, num_gateways=2))

    def known_after(gateway: int) -> int:
        cluster.arrive(SimulatedRequest(tokens(random.Random(0), 1000), 500), gateway=gateway)
        cluster.events.run(cluster.clock.now() + 0.1)
        return cluster.gateways[1 - gateway].router.num_placements

    assert known_after(0) == 1
    cluster.placements.cut()
    assert known_after(0) == 0
    cluster.placements.connect()
    assert known_after(0) == 3
    settled(cluster)


def test_prompts_that_are_shared_are_found_again() -> None:
    cluster = simulated_cluster(ClusterShape([("both", ENGINE)]))
    prompt = tokens(random.Random(0), 1000)
    for _ in range(2):
        cluster.arrive(SimulatedRequest(prompt, 5))
        cluster.finish(10.0)
    first, second = settled(cluster)
    assert (first.num_cached, second.num_cached) == (0, 1000 // 64 * 64)
    assert second.ttft_s < 0.5 * first.ttft_s


@pytest.mark.slow
def test_waits_are_those_of_a_queue_with_poisson_arrivals() -> None:
    """Mean waits of M/D/1: load x service / (2 (1 - load))."""
    steps = StepModel(base_s=0.0, sequence_s=0.0, context_s=0.0, token_s=1e-4)
    engine = SimulatedEngine(steps, num_blocks=100_000, max_batch_tokens=1000, chunk_tokens=1000)
    cluster = simulated_cluster(ClusterShape([("both", engine)], holds_back=False))
    source, service_s, load = random.Random(5), 0.1, 0.6

    def arrive() -> None:
        if len(cluster.records) < 3000:
            cluster.arrive(SimulatedRequest(tokens(source, 1000), 1))
            cluster.events.after(source.expovariate(load / service_s), arrive)

    cluster.events.after(0.0, arrive)
    records = settled(cluster, 1000.0)
    wait_s = float(np.mean([record.ttft_s for record in records])) - service_s
    expected_s = load * service_s / (2 * (1 - load))
    # A plan that is out cannot be changed: one more step is ahead of some arrivals. The network takes 1 ms.
    assert 0.9 * expected_s < wait_s < 1.15 * expected_s + 0.001


def test_every_request_ends_once_when_replicas_die() -> None:
    cluster = simulated_cluster(ClusterShape(SPLIT, num_gateways=2))
    offer(cluster, 12.0, 10.0, 7, classes=("standard", "batch", "interactive"))
    for at, name in ((3.0, "r0000"), (4.0, "r0002"), (6.0, "r0003")):
        cluster.events.at(at, lambda name=name: cluster.end_replica(name, "on purpose"))  # type: ignore[misc]
        role, engine = SPLIT[int(name[-1])]
        cluster.events.at(
            at + 1.5,
            lambda name=name, role=role, engine=engine: cluster.add_replica(name, role, engine),  # type: ignore[misc]
        )
    records = settled(cluster)
    assert all(record.ended_at is not None for record in records)
    assert any(record.num_attempts > 1 for record in records)
    assert all(record.is_good for record in records)


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_older_batching_is_slower(batching: str) -> None:
    def mean_ttft_s(name: str) -> float:
        engine = ENGINE._replace(batching=name, max_sequences=8)  # type: ignore[arg-type]
        cluster = simulated_cluster(ClusterShape([("both", engine)], holds_back=False))
        offer(cluster, 4.0, 12.0, 3)
        return float(np.mean([record.ttft_s for record in settled(cluster)]))

    assert mean_ttft_s(batching) > 2 * mean_ttft_s("continuous")


def test_a_simulation_can_be_repeated() -> None:
    def ends() -> list[float | None]:
        cluster = simulated_cluster(ClusterShape(SPLIT, num_gateways=2), seed=3)
        offer(cluster, 10.0, 5.0, 3)
        return [record.ended_at for record in settled(cluster)]

    assert ends() == ends()


def test_gateways_that_know_each_other_come_close_to_one() -> None:
    def mean_ttft_s(num_gateways: int) -> float:
        cluster: SimulatedCluster = simulated_cluster(
            ClusterShape([("both", ENGINE)] * 4, num_gateways=num_gateways)
        )
        offer(cluster, 30.0, 6.0, 9)
        return float(np.mean([record.ttft_s for record in settled(cluster)]))

    assert mean_ttft_s(3) < 1.3 * mean_ttft_s(1)


@pytest.mark.parametrize("slowness", [1.0, 2.5])
def test_who_shares_steps_is_not_slow_and_who_takes_longer_is(slowness: float) -> None:
    """Bursts share steps, and come behind plans that are out. One replica takes longer than it reports."""
    shape = ClusterShape([("both", ENGINE)] * 2, holds_back=False)
    cluster, source = simulated_cluster(shape), random.Random(4)
    ranks = cluster.replicas[0].ranks
    ranks._model = StepModel(*(slowness * each for each in ranks._model[:5]))
    corrections = []
    for instant in range(20):
        for _ in range(5):
            cluster.arrive(SimulatedRequest(tokens(source, source.randrange(200, 3000)), 1))
        cluster.events.run(2.0 + 0.3 * instant)
        loads = cluster.gateways[0].router.loads
        corrections.append([loads.state(it.identity.replica_id).rates.correction for it in cluster.replicas])
    settled(cluster)
    assert max(second for _, second in corrections) == 1.0
    assert (max(first for first, _ in corrections) > 1.5) == (slowness > 1)
