"""Prefill and decode on two hosts that share nothing but a network, which breaks while streams run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stream_tokens
from optional_programs import needs_ip
from ray_nodes import HostNetwork, RayNodes, host_network
from serving import TINY, RunningCluster, environment, free_port

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    needs_ip,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
START_S = 300.0
NUM_STREAMS = 8
NUM_TOKENS = 1200
FILE = f"""
model: {TINY}
transfer: {{data_host: auto}}
router: {{skip_prefill_tokens: 0}}
auth: {{insecure: true}}
gateway: {{host: auto, resources: {{host_a: 1}}, max_connection_age_s: null}}
pools:
  - {{name: prefill, role: prefill, resources: {{host_a: 1}}, dtype: fp32, cpus_per_rank: 0.2, engine: &small
       {{block_tokens: 16}}}}
  - {{name: near, role: decode, resources: {{host_a: 1}}, dtype: fp32, cpus_per_rank: 0.2, engine: *small}}
  - {{name: far, role: decode, resources: {{host_b: 1}}, dtype: fp32, cpus_per_rank: 0.2, engine: *small}}
"""


class TwoHosts:
    """A cluster over both hosts, and clients beside the gateway."""

    def __init__(self, network: HostNetwork, gateway: str) -> None:
        self.network = network
        self._gateway = gateway

    def streams(self, cut_s: float) -> list[dict[str, Any]]:
        """What became of the streams (`stream_tokens`) when the network broke for so long in the middle."""
        command = [sys.executable, stream_tokens.__file__, self._gateway, str(NUM_STREAMS), str(NUM_TOKENS)]
        with subprocess.Popen(
            self.network.first.command(*command), env=environment(), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            if cut_s:
                self._cut(cut_s)
            reported = process.stdout.readline()
        assert process.returncode == 0
        streams: list[dict[str, Any]] = json.loads(reported)
        return streams

    def _cut(self, cut_s: float) -> None:
        self.network.cut()
        threading.Event().wait(cut_s)
        self.network.mend()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    file = tmp_path_factory.mktemp("hosts") / "cluster.yaml"
    file.write_text(FILE)
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    with host_network() as network:
        nodes = RayNodes(folder, network.first)
        try:
            nodes.start(is_head=True, host=network.first, resources={"host_a": 8})
            nodes.start(is_head=False, host=network.second, resources={"host_b": 8})
            running = RunningCluster(
                "--file",
                str(file),
                "--port",
                str(free_port()),
                start_s=START_S,
                ray_address=nodes.address,
                prefix=network.first.command(),
                variables=nodes.variables,
            )
            yield TwoHosts(network, running.address)
            assert running.stop() == 0
        finally:
            nodes.close()
            shutil.rmtree(folder)


def test_streams_outlive_a_network_that_breaks(hosts: TwoHosts) -> None:
    undisturbed = hosts.streams(0.0)
    assert [stream["num_attempts"] for stream in undisturbed] == [1] * NUM_STREAMS
    handed_over = [event for stream in undisturbed for event in stream["events"] if "handed over" in event]
    assert any(" by tcp" in event for event in handed_over), handed_over
    assert any(" by shm" in event for event in handed_over), handed_over
    expected = [stream["token_ids"] for stream in undisturbed]

    briefly = hosts.streams(3.0)
    assert [stream["token_ids"] for stream in briefly] == expected
    assert [stream["num_attempts"] for stream in briefly] == [1] * NUM_STREAMS

    longer = hosts.streams(12.0)
    assert [stream["token_ids"] for stream in longer] == expected
    assert {stream["num_attempts"] for stream in longer} == {1, 2}, "those of the other host went on here"
