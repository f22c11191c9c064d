"""Ray's GCS, Serve's controller and its proxy are killed under load: requests go on, and so do the counts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from child_processes import closed_on_error, killed_on_error
from cluster_operator import Operator, Steady, pool_of, ready
from optional_programs import uses_redis_or_valkey
from patience import SETTLE_S
from serving import ROOT, TINY, RunningCluster, environment, free_port

from kvtransfer.common.clock import SystemClock
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.index.redis_server import RedisServer

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600), uses_redis_or_valkey]
TRUST = Trust.of(b"of this test alone")


class Head:
    """A Ray cluster as KubeRay runs it, with its tables in Redis."""

    def __init__(self, token_file: Path) -> None:
        token_file.write_text("token-of-a-head-with-redis-0123456789")
        token_file.chmod(0o600)
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
        self._redis = asyncio.run(RedisServer.start("127.0.0.1", TRUST, SystemClock()))
        password = self._redis.url.removeprefix("redis://:").partition("@")[0]
        address = f"127.0.0.1:{self._redis.port}"
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "support" / "redis_head.py"), password],
            env={**environment(), **self.variables, "RAY_REDIS_ADDRESS": address},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with closed_on_error(self._redis), killed_on_error(self._process):
            reported = self._hear()
        self.address, self.dashboard = reported["ray"], reported["dashboard"]

    def restart_gcs(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("gcs\n")
        self._process.stdin.flush()
        assert self._hear() == {"gcs": "restarted"}

    def close(self) -> None:
        family = psutil.Process(self._process.pid).children(recursive=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.stdout.close()
            for process in psutil.wait_procs(family, timeout=10)[1]:
                process.kill()
            self._redis.close()

    def _hear(self) -> dict[str, str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the head has ended"
        reported: dict[str, str] = json.loads(line)
        return reported


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    started = Head(tmp_path / "token")
    yield started
    started.close()


@pytest.fixture
def cluster(tmp_path: Path, head: Head) -> Iterator[RunningCluster]:
    common = "dtype: fp32, cpus_per_rank: 0.1, engine: {block_tokens: 16}"
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"model: {TINY}\n"
        "pools:\n"
        f"  - {{name: prefill, role: prefill, {common}}}\n"
        f"  - {{name: decode, role: decode, {common}}}\n"
        "scaling: {interval_s: 0.5}\n"
    )
    arguments = ("--file", str(file), "--port", str(free_port()))
    running = RunningCluster(*arguments, ray_address=head.address, variables=head.variables)
    yield running
    assert running.stop() == 0


def test_requests_and_counts_outlive_rays_own_processes(head: Head, cluster: RunningCluster) -> None:
    operator = Operator(cluster)
    steady, long = Steady(cluster.address), Steady(cluster.address, prompt_tokens=300, max_tokens=1600)
    operator.scale("decode", 3)
    status = cluster.wait_for(ready("decode", 3), SETTLE_S)
    cluster.wait_for(lambda status: pool_of(status, "decode").pinned)
    before = {replica.replica_id: replica.process_id for replica in status.replicas}
    assert operator.process_ids("ProxyActor")
    for class_name in ("ServeController", "ProxyActor"):
        for process_id in operator.process_ids(class_name):
            os.kill(process_id, signal.SIGKILL)
    head.restart_gcs()
    wait_for_target(operator, "decode", 3)
    num_done = steady.num_done
    operator.scale("prefill", 2)
    cluster.wait_for(ready("prefill", 2), SETTLE_S)
    status = cluster.wait_for(lambda status: pool_of(status, "prefill").pinned)
    assert steady.num_done > num_done
    left = {it.replica_id: it.process_id for it in status.replicas if it.replica_id in before}
    assert left == before
    assert [(pool.desired, pool.pinned) for pool in status.pools] == [(2, True), (3, True)]
    assert operator.target("decode") == 3
    steady.end()
    long.end()
    assert long.num_done >= 1
    assert cluster.status().num_failed_requests == 0


def wait_for_target(operator: Operator, pool: str, num_replicas: int) -> None:
    """The dashboard answers again, after the new GCS and the new controller, and Serve has this target."""
    pause, seen = threading.Event(), None
    for _ in range(300):
        try:
            seen = operator.target(pool)
        except (OSError, KeyError):
            seen = None
        if seen == num_replicas:
            return
        pause.wait(0.2)
    raise AssertionError(f"the target of {pool} is {seen}")
