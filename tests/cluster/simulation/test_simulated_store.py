"""The store of simulated nodes: what decides is what serves, and only copies are modelled."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import ENGINE, STEPS, Log, log_of, offer, settled, simulated_cluster, tokens
from slow_cases import examples, slow_but

from cluster.bench.simulation_options import SimulatedLoadOptions, SimulatedReplicaOptions
from cluster.errors import ConfigError
from cluster.simulation.simulated_call import CallRecord, SimulatedRequest
from cluster.simulation.simulated_cluster import ClusterShape, SimulatedCluster
from cluster.simulation.simulation_result import SimulatedObjectives, result_of
from cluster.simulation.store_shape import StoreShape, parse_store
from kvtransfer.store.dram.catalog import Catalog
from kvtransfer.store.dram.slot_allocator import SlotAllocator
from kvtransfer.store.nvme.segment_table import SegmentTable
from kvtransfer.store.nvme.segment_writer import SegmentWriter
from kvtransfer.store.nvme.segmented_log import SegmentedLog
from kvtransfer.store.policy.nvme_admission import Admission
from kvtransfer.store.server.disk import Disk
from kvtransfer.store.server.loader import RecordLoader
from kvtransfer.store.server.node import StoreNode
from kvtransfer.store.server.node_tiers import NodeTiers
from kvtransfer.store.server.session import EngineSession
from kvtransfer.store.server.session_decisions import SessionDecisions
from kvtransfer.store.server.write_behind import WriteBehind
from workers.store_connector.announced import AnnouncedPrompts
from workers.store_connector.block_loader import BlockLoader
from workers.store_connector.block_saver import BlockSaver
from workers.store_connector.connector import StoreConnector
from workers.store_connector.tier_costs import TierCosts
from workers.store_connector.tier_view import TierView

# Slower prompts than those of ENGINE, so that loading is worth its time at any assumed rate, and few blocks.
SMALL = ENGINE._replace(num_blocks=60, steps=STEPS._replace(token_s=5e-4))
RECORD_BYTES = SMALL.block_bytes
DRAM = StoreShape(64 * 10**9)
# The host tier takes the blocks of three prompts of 1,000 tokens.
NVME = StoreShape(dram_bytes=48 * RECORD_BYTES, nvme_bytes=4 * 10**9)
# A rate at which a request that lost its replica runs alone between plans of others.
RATE_S = 2.492213561877743
# Time of messages between processes, and of steps that wait for the one before.
SLACK_S = 0.003


def revisited(
    store: StoreShape | None, num_replicas: int = 1, at: Callable[[SimulatedCluster], None] | None = None
) -> tuple[SimulatedCluster, list[CallRecord]]:
    """Let six prompts come, one after the other, twice."""
    cluster = simulated_cluster(ClusterShape([("both", SMALL)] * num_replicas, store=store))
    source = random.Random(0)
    prompts = [tokens(source, 1000) for _ in range(6)]
    for round_ in range(2):
        if round_ and at is not None:
            at(cluster)
        for prompt in prompts:
            cluster.arrive(SimulatedRequest(prompt, 5))
            cluster.finish(20.0)
            cluster.events.run(cluster.clock.now() + 0.5)
    return cluster, settled(cluster, cluster.clock.now() + 1.0)


def found_by_tier(cluster: SimulatedCluster) -> dict[str, int]:
    """Return the tokens that replicas have found, of all tiers that had some."""
    totals: dict[str, int] = {}
    for replica in cluster.replicas:
        for tier, count in replica.steps.stats.num_hit_tokens.items():
            totals[tier] = totals.get(tier, 0) + count
    return {tier: count for tier, count in totals.items() if count}


def test_what_decides_in_the_store_is_what_serves() -> None:
    cluster, _ = revisited(NVME)
    assert cluster.stores is not None
    (owner,), connector = cluster.stores.owners, cluster.replicas[0].connector
    assert connector is not None
    tiers = owner.tiers
    log = tiers.disk._nvme
    assert isinstance(log, SegmentedLog)
    parts = {
        StoreConnector: connector,
        BlockLoader: connector.loader,
        BlockSaver: connector.saver,
        TierCosts: connector.costs,
        TierView: connector.view,
        AnnouncedPrompts: connector.announced,
        NodeTiers: tiers,
        Catalog: tiers.catalog,
        SlotAllocator: tiers.catalog._allocator,
        Disk: tiers.disk,
        Admission: tiers.disk._admission,
        SegmentTable: log._table,
        SegmentWriter: log._writer,
        RecordLoader: tiers.loader,
        WriteBehind: tiers.writes,
    }
    for real, used in parts.items():
        assert type(used) is real
    assert issubclass(StoreNode, NodeTiers)
    assert issubclass(EngineSession, SessionDecisions)
    # The log differs in what it costs, and in that it has no folder.
    own = {name for name in vars(type(log)) if name in vars(SegmentedLog) and not name.startswith("__")}
    assert own == {"open", "close", "erase", "end_purge", "read", "write_run", "compact"}


def test_a_prompt_that_left_the_device_is_loaded_from_dram_in_the_time_of_its_bytes() -> None:
    cluster, records = revisited(DRAM)
    assert [record.num_cached for record in records] == [0] * 6 + [960] * 6
    assert found_by_tier(cluster) == {"dram": 6 * 960}
    load_s = 15 * RECORD_BYTES / DRAM.link_bytes_s
    compute_s = SMALL.steps.step_s(0, 0, [(960, 40)])
    for record in records[6:]:
        assert load_s + compute_s < record.ttft_s < load_s + compute_s + SLACK_S


def test_a_prompt_that_left_dram_is_loaded_from_nvme_in_the_time_of_its_bytes() -> None:
    cluster, records = revisited(NVME)
    assert [record.num_cached for record in records] == [0] * 6 + [960] * 6
    assert found_by_tier(cluster) == {"nvme": 6 * 960}
    # Copies to the device run beside the reads that follow, but for those of the last block.
    read_s = 15 * RECORD_BYTES / NVME.read_bytes_s
    compute_s = SMALL.steps.step_s(0, 0, [(960, 40)])
    for record in records[6:]:
        assert read_s + compute_s < record.ttft_s < read_s + compute_s + SLACK_S


def test_without_nvme_what_left_dram_is_computed() -> None:
    _, records = revisited(NVME._replace(nvme_bytes=0))
    assert all(record.num_cached == 0 for record in records)


def test_replicas_of_a_node_share_its_store() -> None:
    def leave_the_first(cluster: SimulatedCluster) -> None:
        cluster.end_replica("r0000", "on purpose")
        cluster.events.run(cluster.clock.now() + 1.0)

    cluster, records = revisited(DRAM._replace(replicas_per_node=2), 2, leave_the_first)
    assert {record.prefill for record in records[:6]} == {"r0000", "r0001"}
    assert {record.prefill for record in records[6:]} == {"r0001"}
    assert all(record.num_cached == 960 for record in records[6:])
    assert found_by_tier(cluster)["dram"] >= 3 * 960


@pytest.mark.parametrize("shares", [True, False])
def test_records_of_another_node_come_over_the_network(shares: bool) -> None:
    def leave_the_first(cluster: SimulatedCluster) -> None:
        cluster.end_replica("r0000", "on purpose")
        cluster.events.run(cluster.clock.now() + 1.0)

    shape = DRAM._replace(replicas_per_node=1, shares=shares)
    cluster, records = revisited(shape, 2, leave_the_first)
    num_of_first = sum(record.prefill == "r0000" for record in records[:6])
    assert num_of_first
    num_remote = found_by_tier(cluster).get("remote", 0)
    assert num_remote == (num_of_first * 960 if shares else 0)


def test_hits_of_all_tiers_are_all_hits() -> None:
    cluster = simulated_cluster(ClusterShape([("both", SMALL)] * 2, store=NVME))
    offer(cluster, 3.0, 10.0, 1, mean_input=300, mean_output=20)
    settled(cluster)
    result = result_of(cluster, 1.0, SimulatedObjectives(5.0, 0.1))
    for use in result.replicas:
        assert sum(use.tier_to_found.values()) == use.num_found
    hits, values = result.tier_hits, result.as_json()
    num_queried = sum(use.num_computed + use.num_found for use in result.replicas)
    assert sum(hits.values()) == pytest.approx(sum(use.num_found for use in result.replicas) / num_queried)
    assert values["nvme_written_gb"] > 0


def test_nvme_that_is_full_is_compacted_and_keeps_to_its_size() -> None:
    """Some hundred records of 8 MB go through two gigabytes."""
    shape = NVME._replace(nvme_bytes=2 * 10**9, admission="all")
    cluster = simulated_cluster(ClusterShape([("both", SMALL)], store=shape, holds_back=False))
    source = random.Random(3)
    for _ in range(30):
        cluster.arrive(SimulatedRequest(tokens(source, 1000), 2))
        cluster.finish(20.0)
    settled(cluster, cluster.clock.now() + 1.0)
    assert cluster.stores is not None
    stat = cluster.stores.owners[0].tiers.disk.stat()
    assert stat is not None
    assert stat.num_evictions
    assert stat.num_bytes <= 2 * 10**9 < stat.num_written_bytes


def lose_the_last(cluster: SimulatedCluster) -> None:
    """Let the last replica die while requests run there, and come back: they go to others, where each runs
    alone at first."""
    last = cluster.replicas[-1]
    name, role = last.identity.replica_id, last.role
    cluster.events.at(3.01, lambda: cluster.end_replica(name, "on purpose"))
    cluster.events.at(4.5, lambda: cluster.add_replica(name, role, SMALL))


def log_with(
    shape: ClusterShape, rate_s: float, seed: int, *, dies: bool
) -> tuple[Log, dict[str, int], int, int]:
    """Return what happened, the hits, the writes to NVMe, and the events that it took."""
    cluster = simulated_cluster(shape)
    offer(cluster, rate_s, 4.0, seed, mean_input=300, mean_output=60)
    if dies:
        lose_the_last(cluster)
    records = settled(cluster)
    num_written = 0 if cluster.stores is None else cluster.stores.num_written_bytes
    return log_of(records), found_by_tier(cluster), num_written, cluster.events.num_events


def save_events(shape: ClusterShape, rate_s: float, seed: int, *, dies: bool = False) -> bool:
    """Assert that runs change nothing of what happens; return whether they have saved events."""
    *in_runs, num_events = log_with(shape._replace(skips=True), rate_s, seed, dies=dies)
    *one_by_one, num_more = log_with(shape._replace(skips=False), rate_s, seed, dies=dies)
    assert in_runs == one_by_one
    return bool(in_runs[0]) and num_events < num_more


@pytest.mark.parametrize("store", slow_but([DRAM, NVME, NVME._replace(replicas_per_node=1)], NVME))
@pytest.mark.parametrize("roles", slow_but([("both",) * 2, ("prefill", "decode")], ("prefill", "decode")))
def test_steps_in_runs_change_nothing_where_there_is_a_store(
    store: StoreShape, roles: tuple[str, ...]
) -> None:
    assert save_events(ClusterShape([(role, SMALL) for role in roles], store=store), 2.0, 1)


@pytest.mark.parametrize("store", [None, NVME])
def test_steps_in_runs_leave_suspects_their_turns(store: StoreShape | None) -> None:
    """Plans of others that runs pass over count for whose turn is next."""
    assert save_events(
        ClusterShape([("both", SMALL)] * 3, num_gateways=2, store=store), RATE_S, 8271, dies=True
    )


@pytest.mark.slow
@settings(max_examples=examples(10), deadline=None)
@given(
    roles=st.sampled_from([("both",), ("both",) * 3, ("prefill", "decode"), ("prefill", "both", "decode")]),
    rate_s=st.floats(0.5, 3.0),
    seed=st.integers(0, 1 << 16),
    num_gateways=st.integers(1, 2),
    per_node=st.integers(1, 3),
    shares=st.booleans(),
    dies=st.booleans(),
)
def test_steps_in_runs_change_nothing_whatever_the_cluster(
    roles: tuple[str, ...],
    rate_s: float,
    seed: int,
    num_gateways: int,
    per_node: int,
    shares: bool,
    dies: bool,
) -> None:
    store = NVME._replace(replicas_per_node=per_node, shares=shares)
    shape = ClusterShape([(role, SMALL) for role in roles], num_gateways=num_gateways, store=store)
    save_events(shape, rate_s, seed, dies=dies)


def test_the_options_of_a_store() -> None:
    assert parse_store("") is None
    shape = parse_store("dram=64,nvme=500,link=50,read=7,write=5,network=25,admission=all,shared=no", 2, 4)
    assert shape == StoreShape(
        64 * 10**9, 500 * 10**9, 100e9, 7e9, 5e9, 25e9, "all", replicas_per_node=4, shares=False
    )
    default = parse_store("dram=1", 4)
    assert default is not None
    assert default.link_bytes_s == 4 * StoreShape(0).link_bytes_s


def test_the_command_gives_every_node_its_store() -> None:
    replicas = SimulatedReplicaOptions(tp=2, store="dram=8,nvme=16", replicas_per_node=3)
    load = SimulatedLoadOptions(format="synthetic")
    assert replicas.shape(load, policy="cost").store == parse_store("dram=8,nvme=16", 2, 3)


@pytest.mark.parametrize(
    "text",
    ["nvme=4", "dram=x", "dram=-1", "dram=1,nvme=0.1", "dram=1,read=0", "dram=1,admission=some", "ram=1"],
)
def test_a_store_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--store"):
        parse_store(text)
