"""Two Ray nodes on this machine, each with a store and a replica: what one computed the other fetches."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import RayNodes
from serving import TINY, RunningCluster, free_port

from cluster.api.blocking_client import BlockingAdminClient, BlockingClient
from cluster.api.client import Completion
from cluster.api.generate_options import GenerateOptions
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
START_S = 300.0
NUM_TOKENS = 400
# A look-up may take longer than usual: this machine has much to do.
FILE = f"""
model: {TINY}
debug: {{allow_pins: true}}
transfer: {{data_host: auto}}
store: {{lookup_budget_ms: 100}}
pools:
  - name: decode
    role: both
    replicas: 2
    dtype: fp32
    cpus_per_rank: 1
    engine: {{block_tokens: 16, kv_tokens: 4096}}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE)
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    nodes = RayNodes(folder)
    try:
        nodes.start(is_head=True)
        nodes.start(is_head=False)
        running = RunningCluster(
            *("--file", str(file), "--port", str(free_port())),
            start_s=START_S,
            ray_address=nodes.address,
            variables=nodes.variables,
        )
        yield running
        assert running.stop() == 0
    finally:
        nodes.close()
        shutil.rmtree(folder)


def test_what_one_node_computed_another_fetches(cluster: RunningCluster) -> None:
    prompt = [100 + number % 170 for number in range(NUM_TOKENS)]
    with (
        BlockingClient(cluster.address) as client,
        BlockingAdminClient(cluster.admin_address) as admin,
    ):

        def is_open(_: admin_pb.StatusResponse) -> bool:
            nodes = admin.store_stat().nodes
            return [node.num_sessions for node in nodes] == [1, 1] and all(
                node.index.state == "up" and node.tiers[0].capacity_bytes for node in nodes
            )

        status = cluster.wait_for(is_open)
        assert len({store.node_id for store in status.stores}) == 2
        first, second = (replica.replica_id for replica in status.replicas)

        def run(replica: str, tenant: str) -> Completion:
            options = GenerateOptions(
                max_tokens=16,
                temperature=0.8,
                seed=5,
                ignore_eos=True,
                tenant=tenant,
                pinned_prefill=replica,
                pinned_decode=replica,
            )
            return client.complete(prompt, options, timeout_s=60)

        def held(tenant: str) -> list[int]:
            asked = admin_pb.StoreListRequest(filter=admin_pb.StoreFilter(sharing_group=tenant))
            return sorted(node.num_matching for node in admin.store_list(asked).nodes)

        num_blocks = NUM_TOKENS // 16
        for number in range(10):  # a look-up may be late: then the next
            tenant = f"tenant-{number}"
            computed = run(first, tenant)
            assert computed.finished.usage.cached.remote == 0
            cluster.wait_for(lambda _: held(tenant) >= [0, num_blocks])  # noqa: B023
            fetched = run(second, tenant)
            assert fetched.finished.decode_replica == second
            assert fetched.token_ids == computed.token_ids
            if fetched.finished.usage.cached.remote:
                break
        assert fetched.finished.usage.cached.remote >= (num_blocks - 1) * 16
        stat = admin.store_stat()
    hits = [tier.num_hits for node in stat.nodes for tier in node.tiers if tier.tier == "remote"]
    assert sorted(hits) >= [0, num_blocks - 1]
