"""Brains and gateway killed at named points of the protocol in the running service: same tokens, recovery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import TINY, RunningCluster, free_port

from cluster.api.blocking_client import BlockingClient
from cluster.api.generate_options import GenerateOptions
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
# Each point, and its passage at which the process that passes it is killed.
POINTS = {"engine_core.hand_over": 1, "engine_core.join": 1, "gateway.token": 150}
OPTIONS = GenerateOptions(max_tokens=80, temperature=0.8, seed=21, ignore_eos=True)


@pytest.fixture
def markers(tmp_path: Path) -> dict[str, Path]:
    return {point: tmp_path / point for point in POINTS}


@pytest.fixture
def cluster(tmp_path: Path, markers: dict[str, Path]) -> Iterator[RunningCluster]:
    faults = "".join(
        f"    - {{point: {point}, action: kill, marker: {markers[point]}, after: {after}}}\n"
        for point, after in POINTS.items()
    )
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"model: {TINY}\n"
        "pools:\n"
        "  - {name: prefill, role: prefill, dtype: fp32, engine: {block_tokens: 16}}\n"
        "  - {name: decode, role: decode, dtype: fp32, engine: {block_tokens: 16}}\n"
        f"debug:\n  faults:\n{faults}"
    )
    running = RunningCluster("--file", str(file), "--port", str(free_port()))
    yield running
    assert running.stop() == 0


def prompt(number: int) -> str:
    """Long, and shared with no other: it goes through both pools."""
    return "".join(f"def function_{number}_{line}(self):\n    return {line}\n\n" for line in range(14))


def test_every_process_may_die_at_its_point(cluster: RunningCluster, markers: dict[str, Path]) -> None:
    heard: dict[int, tuple[int, ...]] = {}
    with BlockingClient(cluster.address) as client:
        for number in range(12):
            struck = sum(marker.exists() for marker in markers.values())
            if struck == len(markers):
                break
            done = client.complete(prompt(number), OPTIONS, timeout_s=90)
            heard[number] = done.token_ids[0]
            assert len(heard[number]) == 80
            if sum(marker.exists() for marker in markers.values()) > struck:
                cluster.wait_for(
                    lambda status: (
                        {replica.state for replica in status.replicas} == {admin_pb.REPLICA_STATE_READY}
                        and {replica.role for replica in status.replicas}
                        == {admin_pb.REPLICA_ROLE_PREFILL, admin_pb.REPLICA_ROLE_DECODE}
                    ),
                    60,
                )
        assert all(marker.exists() for marker in markers.values()), "every point was reached"
        for number, tokens in heard.items():
            assert client.complete(prompt(number), OPTIONS, timeout_s=60).token_ids[0] == tokens
    for replica in cluster.status().replicas:
        assert replica.load.num_leaked_blocks == replica.load.num_quarantined_blocks == 0
