"""The service as a user runs it: Ray, Serve, pools and the command line, over one running cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import WAIT_S
from serving import TINY, RunningCluster, free_port, object_store_counters, tandem

from cluster.api.blocking_client import BlockingAdminClient, BlockingClient
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb

# `make test` serves the same pools in the test of the demo.
pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PROMPT = "".join(
    f"def function_{number}(self, value):\n    return value + {number}\n\n" for number in range(12)
)


# fp32, in which a resumed stream continues with the same tokens, always.
FILE = f"""
model: {TINY}
pools:
  - {{name: prefill, role: prefill, dtype: fp32, engine: {{block_tokens: 16}}}}
  - {{name: decode, role: decode, dtype: fp32, engine: {{block_tokens: 16}}}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    file = tmp_path_factory.mktemp("serve") / "cluster.yaml"
    file.write_text(FILE)
    running = RunningCluster("--file", str(file), "--port", str(free_port()))
    processes = running.processes()
    yield running
    assert running.stop() == 0
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[BlockingClient]:
    with BlockingClient(cluster.address) as opened:
        yield opened


@pytest.fixture
def admin(cluster: RunningCluster) -> Iterator[BlockingAdminClient]:
    with BlockingAdminClient(cluster.admin_address) as opened:
        yield opened


def store_is_open(admin: BlockingAdminClient) -> bool:
    """Both replicas use it: what they finish from now on is written through."""
    return any(
        node.num_sessions == 2 and node.tiers[0].capacity_bytes > 0 for node in admin.store_stat().nodes
    )


def roles(status: admin_pb.StatusResponse) -> list[str]:
    ready = [it for it in status.replicas if it.state == admin_pb.REPLICA_STATE_READY]
    return sorted(name_of(admin_pb.ReplicaRole, replica.role) for replica in ready)


def measured_paths(cluster: RunningCluster) -> list[admin_pb.Path]:
    """Of the prefill replica, once there are any."""
    found: list[admin_pb.Path] = []

    def are_there(status: admin_pb.StatusResponse) -> bool:
        with BlockingAdminClient(cluster.admin_address) as admin:
            found[:] = [path for replica in admin.paths() for path in replica.paths]
        return bool(found)

    cluster.wait_for(are_there, 15)
    return found


def test_both_pools_serve_and_their_path_is_measured(cluster: RunningCluster) -> None:
    (path,) = measured_paths(cluster)
    status = cluster.status()
    assert roles(status) == ["decode", "prefill"]
    assert status.ready
    assert path.transport == "shm"
    assert path.gb_s > 0
    assert (
        len({pid for replica in status.replicas for pid in (replica.process_id, *replica.rank_process_ids)})
        == 4
    )


def test_no_process_spreads_what_it_allocates_over_many_heaps(cluster: RunningCluster) -> None:
    status = cluster.status()
    process_ids = [it.process_id for it in status.gateways]
    process_ids += [it.process_id for it in status.stores]
    for replica in status.replicas:
        process_ids += [replica.process_id, *replica.rank_process_ids]
    for process_id in process_ids:
        assert psutil.Process(process_id).environ()["MALLOC_ARENA_MAX"] == "2"


def test_it_says_where_everything_is(cluster: RunningCluster) -> None:
    names = {"gateway", "HTTP", "admin", "console", "Ray", "dashboard", "Ray token", "logs"}
    assert set(cluster.addresses) == names
    assert any(line.startswith("callers    not authenticated") for line in cluster.lines)
    assert cluster.addresses["dashboard"].startswith("http://")


def test_a_long_prompt_is_prefilled_here_and_decoded_there(
    client: BlockingClient, admin: BlockingAdminClient
) -> None:
    first = client.complete(PROMPT, GenerateOptions(max_tokens=12), timeout_s=60)
    assert first.finished.prefill_replica.startswith("prefill-")
    assert first.finished.decode_replica.startswith("decode-")
    assert first.finished.timing.transport == "shm"
    assert first.finished.timing.transfer_bytes > 0
    second = client.complete(PROMPT, GenerateOptions(max_tokens=12), timeout_s=60)
    assert second.finished.usage.cached.device > 0
    assert second.token_ids == first.token_ids


def test_every_path_is_logged_and_metrics_are_exported_to_prometheus(
    cluster: RunningCluster, client: BlockingClient, admin: BlockingAdminClient
) -> None:
    """Ray hands the figures on some seconds later."""
    (path,) = measured_paths(cluster)
    prefill, decode = cluster.replica("prefill"), cluster.replica("decode")
    pause = threading.Event()
    cluster.wait_for(lambda _: store_is_open(admin))
    for number in range(8):  # cancelled ever later, so that some have a landing
        stream = client.generate(f"# {number}\n{PROMPT * 8}", GenerateOptions(max_tokens=4), timeout_s=60)
        next(iter(stream))
        pause.wait(0.01 * number)
        stream.close()
    client.complete(f"# last\n{PROMPT}", GenerateOptions(max_tokens=4), timeout_s=60)
    wanted = {"ray_tandem_lost_landings_total", "ray_tandem_moved_bytes_total", "ray_tandem_steps_total"}
    wanted |= {"ray_tandem_store_put_bytes_total", "ray_tandem_store_bytes", "ray_tandem_stored_blocks_total"}
    for _ in range(int(WAIT_S / 0.25)):
        series = cluster.metrics()
        if wanted <= series.keys():
            break
        pause.wait(0.25)
    assert wanted <= series.keys()
    (labels, rate), (latency_labels, latency_s) = (
        only_of(series[f"ray_tandem_path_{what}"], prefill)
        for what in ("bytes_per_second", "latency_seconds")
    )
    assert {
        "pool": "prefill",
        "peer": decode.replica_id,
        "rank": "0",
        "peer_rank": "0",
    }.items() <= labels.items()
    assert (labels["transport"], labels["device"]) == ("shm", "memory")
    assert latency_labels["peer"] == decode.replica_id
    assert rate == pytest.approx(path.gb_s * 1e9)
    assert latency_s == pytest.approx(path.latency_us * 1e-6)
    assert only_of(series["ray_tandem_free_blocks"], decode)[1] <= decode.load.num_total_blocks
    assert only_of(series["ray_tandem_steps_total"], prefill)[1] >= 1
    lost = [
        item for item in series["ray_tandem_lost_landings_total"] if item[0]["replica"] == decode.replica_id
    ]
    assert all(item["cause"] and number >= 1 for item, number in lost)
    moved = only_of(series["ray_tandem_moved_bytes_total"], prefill)
    assert moved[0]["class"] == "hand_over"
    assert moved[1] > 0
    stores = {
        labels["node"]: num for labels, num in series["ray_tandem_store_bytes"] if labels["tier"] == "dram"
    }
    assert stores.keys() == {cluster.status().stores[0].node_id}
    assert not [name for name in series if name.startswith("ray_tandem_num_")]
    line = rf"INFO tandem.peers: {prefill.replica_id} rank 0 writes to {decode.replica_id} rank 0 over shm"
    assert re.search(line, cluster.log())


def only_of(
    series: list[tuple[dict[str, str], float]], replica: admin_pb.Replica
) -> tuple[dict[str, str], float]:
    (found,) = (item for item in series if item[0]["replica"] == replica.replica_id)
    return found


def test_no_token_and_no_kv_crosses_ray(cluster: RunningCluster, client: BlockingClient) -> None:
    first, before = object_store_counters(cluster), object_store_counters(cluster)
    for number in range(4):
        client.complete(f"# {number}\n{PROMPT}", GenerateOptions(max_tokens=16), timeout_s=60)
    after = object_store_counters(cluster)
    asking = {name: before[name] - first[name] for name in before}  # who asks is a worker too
    assert {name: after[name] - before[name] for name in before} == asking


def test_generate_as_text_and_as_json(cluster: RunningCluster) -> None:
    common = ("generate", "import os\n", "--address", cluster.address, "--max-tokens", "8")
    text = tandem(*common)
    assert text.returncode == 0
    done = tandem(*common, "--json", "--request-id", "as-json")
    assert done.returncode == 0
    result: dict[str, Any] = json.loads(done.stdout)
    assert {"text", "token_ids", "finish_reason", "usage", "timing"} <= set(result)
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) == 8
    assert result["text"] == text.stdout[:-1]
    explained = tandem("explain", "as-json", "--address", cluster.address)
    assert "candidates" in tandem("explain", "as-json", "--address", cluster.address, "--json").stdout
    assert "finished" in explained.stdout


def test_status_as_table_and_as_json(cluster: RunningCluster) -> None:
    shown = tandem("status", "--admin-address", cluster.admin_address).stdout
    assert "prefill" in shown
    assert "GB/s" in shown
    status = json.loads(tandem("status", "--admin-address", cluster.admin_address, "--json").stdout)
    assert sorted(replica["role"] for replica in status["replicas"]) == ["decode", "prefill"]
    assert all(replica["load"]["num_leaked_blocks"] == 0 for replica in status["replicas"])
    assert any(written["paths"] for written in status["paths"])
    (member,), (node,) = status["stores"], status["store_stats"]
    assert node["member"] == member
    assert psutil.pid_exists(member["process_id"])
    assert str(member["process_id"]) in shown
    assert [tier["tier"] for tier in node["tiers"]][:1] == ["dram"]


def test_an_error_names_the_field_and_fails_the_command(cluster: RunningCluster) -> None:
    done = tandem("generate", "x", "--temperature", "-1", "--address", cluster.address)
    assert done.returncode == 1
    assert "temperature" in done.stderr


def test_the_serving_benchmark(cluster: RunningCluster) -> None:
    shape = ("--requests", "6", "--input-tokens", "48", "--output-tokens", "6", "--address", cluster.address)
    done = tandem("bench", "serve", "--sweep", "4,8", "--json", *shape)
    assert done.returncode == 0, done.stderr
    low, high, knee = (json.loads(line) for line in done.stdout.splitlines())
    assert (low["offered_per_s"], high["offered_per_s"]) == (4, 8)
    assert low["num_ok"] == high["num_ok"] == 6
    assert low["ttft_ms"]["p50"] > 0
    assert knee["what"] == "knee"
    table = tandem("bench", "serve", "--concurrency", "3", "--shared-prefix", "32", *shape)
    assert "TTFT p99, ms" in table.stdout


def test_the_store_of_the_node_is_restarted_and_a_tenants_records_are_purged(
    cluster: RunningCluster, client: BlockingClient, admin: BlockingAdminClient
) -> None:
    def held(tenant: str) -> int:
        listed = admin.store_list(
            admin_pb.StoreListRequest(filter=admin_pb.StoreFilter(sharing_group=tenant))
        )
        return sum(node.num_matching for node in listed.nodes if not node.error)

    def serve_and_wait(tenant: str) -> tuple[tuple[int, ...], ...]:
        options = GenerateOptions(max_tokens=4, tenant=tenant)
        cluster.wait_for(lambda _: store_is_open(admin))
        done = client.complete(PROMPT, options, timeout_s=60)
        cluster.wait_for(lambda _: held(tenant) >= 10)
        return done.token_ids

    (store,) = cluster.wait_for(lambda status: len(status.stores) == 1).stores
    tokens = serve_and_wait("first")
    assert psutil.Process(store.process_id).name() == "ray::StoreActor"
    os.kill(store.process_id, signal.SIGKILL)
    restarted = cluster.wait_for(lambda status: [it.epoch for it in status.stores] > [store.epoch])
    assert restarted.stores[0].node_id == store.node_id
    assert serve_and_wait("second") == tokens
    at = ("--admin-address", cluster.admin_address)
    purged = tandem("store", "purge", "--sharing-group", "second", "--yes", "--json", *at)
    assert purged.returncode == 0, purged.stderr
    (node,) = json.loads(purged.stdout)["nodes"]
    assert node["num_records"]["dram"] >= 10
    assert held("second") == 0
    shown = tandem("status", "--admin-address", cluster.admin_address).stdout
    assert re.search(rf"{store.node_id} dram .* up", shown)
    assert held("first") > 0, "the arena was taken over from the ranks, and the purge was of the other tenant"


@pytest.mark.parametrize("victim", ["rank", "engine core"])
def test_a_killed_replica_is_replaced_and_the_stream_completes(
    cluster: RunningCluster, client: BlockingClient, victim: str
) -> None:
    options = GenerateOptions(max_tokens=1200, temperature=0.8, seed=11, ignore_eos=True)
    whole = client.complete(PROMPT, options, timeout_s=60)
    replica = cluster.replica("decode")
    process_id = replica.rank_process_ids[0] if victim == "rank" else replica.process_id
    tokens: list[int] = []
    for event in client.generate(PROMPT, options, timeout_s=60):
        if isinstance(event, pb.Delta):
            if len(tokens) < 10 <= len(tokens) + len(event.token_ids):
                os.kill(process_id, signal.SIGKILL)
            tokens.extend(event.token_ids)
        if isinstance(event, pb.Finished):
            assert event.timing.attempts >= 2, "it still ran when its replica died"
    assert tuple(tokens) == whole.token_ids[0]
    cluster.wait_for(
        lambda status: (
            roles(status) == ["decode", "prefill"]
            and all(other.replica_id != replica.replica_id for other in status.replicas)
        ),
        30,
    )


async def test_a_killed_gateway_comes_back_and_the_stream_completes(cluster: RunningCluster) -> None:
    # It must still run when its gateway dies, however fast the engine is.
    options = GenerateOptions(max_tokens=1200, temperature=0.8, seed=12, ignore_eos=True)
    process_id = cluster.status().gateways[0].process_id
    async with Client(cluster.address) as client:
        whole = await client.complete(PROMPT, options, timeout_s=60)
        stream = client.generate(PROMPT, options, timeout_s=60)
        tokens: list[int] = []
        async for event in stream.events():
            if isinstance(event, pb.Delta):
                if len(tokens) < 10 <= len(tokens) + len(event.token_ids):
                    os.kill(process_id, signal.SIGKILL)
                tokens.extend(event.token_ids)
    assert stream.num_resumes >= 1
    assert tuple(tokens) == whole.token_ids[0]
    (gateway,) = cluster.wait_for(lambda status: len(status.gateways) == 1).gateways
    assert gateway.process_id != process_id


def test_the_operators_scale_api_scales_a_pool_up_and_down(
    cluster: RunningCluster, client: BlockingClient
) -> None:
    token = Path(cluster.addresses["Ray token"].removeprefix("in ")).read_text().strip()

    def scale(num_replicas: int) -> None:
        path = "/api/v1/applications/tandem/deployments/Pool-decode/scale"
        request = urllib.request.Request(
            cluster.addresses["dashboard"] + path,
            data=json.dumps({"target_num_replicas": num_replicas}).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as reply:
            assert reply.status == 200

    cluster.wait_for(lambda status: roles(status) == ["decode", "prefill"])
    scale(2)
    cluster.wait_for(lambda status: roles(status) == ["decode", "decode", "prefill"])
    options = GenerateOptions(max_tokens=200, ignore_eos=True)
    whole = client.complete(PROMPT, options, timeout_s=60)
    tokens: list[int] = []
    for event in client.generate(PROMPT, options, timeout_s=60):
        if isinstance(event, pb.Delta):
            if not tokens:
                scale(1)
            tokens.extend(event.token_ids)
    assert tuple(tokens) == whole.token_ids[0]
    cluster.wait_for(lambda status: roles(status) == ["decode", "prefill"] and len(status.replicas) == 2)
