"""The autoscaler in the running service: bursts move counts and roles, and no request notices."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_operator import Steady, pool_of
from serving import TINY, RunningCluster, free_port

from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
ENGINE = "engine: {block_tokens: 16, max_sequences: 4}"
COMMON = f"dtype: fp32, cpus_per_rank: 0.1, {ENGINE}"


def start(folder: Path, scaling: str, num_prefill: int) -> RunningCluster:
    """Prompts that are short enough go past the prefill pool, so that the load is decode's."""
    file = folder / "cluster.yaml"
    file.write_text(
        f"model: {TINY}\n"
        "pools:\n"
        f"  - {{name: prefill, role: prefill, replicas: {num_prefill}, {COMMON}}}\n"
        f"  - {{name: decode, role: decode, {COMMON}}}\n"
        "router: {skip_prefill_tokens: 256}\n"
        f"scaling: {{interval_s: 0.5, forecast_s: 20, {scaling}}}\n"
    )
    return RunningCluster("--file", str(file), "--port", str(free_port()))


def roles(status: admin_pb.StatusResponse, pool: str) -> list[str]:
    return sorted(
        name_of(admin_pb.ReplicaRole, replica.role) for replica in status.replicas if replica.pool == pool
    )


def lends(replica: admin_pb.Replica) -> bool:
    """Whether a prefill replica decodes."""
    roles = admin_pb.REPLICA_ROLE_DECODE, admin_pb.REPLICA_ROLE_PREFILL
    return (replica.role, replica.home_role) == roles


def test_a_burst_scales_decode_up_and_back(tmp_path: Path) -> None:
    scaling = "autoscale: true, up_cool_down_s: 2, down_cool_down_s: 8, pools: {decode: {min: 1, max: 3}}"
    cluster = start(tmp_path, scaling, 1)
    try:
        burst = Steady(cluster.address, num_threads=16, prompt_tokens=48, max_tokens=200)
        status = cluster.wait_for(lambda status: pool_of(status, "decode").num_ready >= 2)
        assert pool_of(status, "prefill").desired == 1
        burst.end()
        cluster.wait_for(
            lambda status: (
                pool_of(status, "decode").desired == 1
                and [it.state for it in status.replicas if it.pool == "decode"]
                == [admin_pb.REPLICA_STATE_READY]
            ),
            120,
        )
        status = cluster.status()
        moves = [move for move in status.scaling_changes if move.pool == "decode"]
        assert {move.by for move in moves} == {"autoscaler"}
        assert all(move.reason for move in moves)
        assert (moves[0].before, moves[-1].after) == (1, 1)
        assert not pool_of(status, "decode").pinned
        assert status.num_failed_requests == 0
        assert burst.num_done > 16
    finally:
        assert cluster.stop() == 0


def test_an_idle_prefill_replica_decodes_for_a_while_with_the_weights_it_has(tmp_path: Path) -> None:
    cluster = start(tmp_path, "change_roles: true, role_change_after_s: 2", 2)
    try:
        before = {replica.replica_id: replica.process_id for replica in cluster.status().replicas}
        burst = Steady(cluster.address, num_threads=16, prompt_tokens=48, max_tokens=200)
        cluster.wait_for(lambda status: roles(status, "prefill") == ["decode", "prefill"])
        status = cluster.wait_for(
            lambda status: any(
                replica.pool == "prefill"
                and replica.role == admin_pb.REPLICA_ROLE_DECODE
                and replica.load.num_running > 0
                for replica in status.replicas
            ),
            30,
        )
        (lent,) = [it for it in status.replicas if lends(it)]
        assert lent.role_epoch > 0
        assert [(pool.name, pool.num_ready, pool.num_reassigned) for pool in status.pools] == [
            ("prefill", 2, 1),
            ("decode", 1, 0),
        ]
        burst.end()
        status = cluster.wait_for(lambda status: roles(status, "prefill") == ["prefill", "prefill"])
        assert {it.replica_id: it.process_id for it in status.replicas} == before
        assert status.num_failed_requests == 0
        assert {move.by for move in status.scaling_changes} == {"autoscaler"}
        assert [(move.before, move.after) for move in status.scaling_changes[:2]] == [(2, 2)] * 2
    finally:
        assert cluster.stop() == 0
