"""A configuration deployed over a pool that was scaled out stops nobody, in real Ray Serve; and a second Ray
cluster that takes over, as in KubeRay upgrades, begins with the counts of the first."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import dummy_pools
import pytest
from chart_harness import with_value
from import_path import import_path
from index_harness import RawRedis
from serving import ROOT, TINY, environment, free_port

from cluster.api.blocking_client import BlockingAdminClient
from cluster.errors import CallError
from cluster.identity.key_roots import rotate_key_root
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.clock import SystemClock

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TOKEN = "token-of-the-test-0123456789"
APP, POOL = "tandem", "Pool-decode"
SETTLE_S = 120.0
_LOOK_S = 0.05


class Seen(NamedTuple):
    """The pool at one moment: Serve's target, and its replicas by state."""

    target: int
    states: Counter[str]

    @property
    def num_staying(self) -> int:
        return self.states.total() - self.states["STOPPING"]


class Head:
    """A Ray cluster of its own, and Serve's REST API in it."""

    def __init__(self) -> None:
        support = Path(dummy_pools.__file__).parent
        self._clock = SystemClock()
        self._process = subprocess.Popen(
            [sys.executable, dummy_pools.__file__],
            env={
                **environment(),
                "PYTHONPATH": import_path(ROOT, support),
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": TOKEN,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._url = f"http://{json.loads(self._process.stdout.readline())['dashboard']}"
        self.history: list[Seen] = []
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def ask(self, path: str, body: Any = None, method: str = "GET") -> Any:
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            text = reply.read()
        return json.loads(text) if text.startswith(b"{") else None

    def deploy(self, application: dict[str, Any]) -> None:
        config = {"proxy_location": "Disabled", "applications": [application]}
        self.ask("/api/serve/applications/", config, "PUT")

    def pool(self) -> dict[str, Any] | None:
        """What Serve tells of the pool; None while it builds the application."""
        found = self.ask("/api/serve/applications/")["applications"].get(APP, {})
        deployment: dict[str, Any] | None = found.get("deployments", {}).get(POOL)
        return deployment

    def replicas(self) -> dict[str, str]:
        """Replica to state."""
        return {each["replica_id"]: each["state"] for each in (self.pool() or {"replicas": []})["replicas"]}

    def until(self, condition: Callable[[], bool]) -> None:
        end = self._clock.now() + SETTLE_S
        while not condition():
            assert self._clock.now() < end, (self.ask("/api/serve/applications/"), self.history[-5:])
            self._stop.wait(0.2)

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            try:
                pool = self.pool()
            except (OSError, KeyError):
                continue  # Serve does not run yet
            if pool is not None:
                states = Counter(replica["state"] for replica in pool["replicas"])
                self.history.append(Seen(pool["target_num_replicas"], states))

    def close(self) -> None:
        self._stop.set()
        self._watcher.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture
def application(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Two replicas are declared."""
    with closing(RawRedis(tmp_path)) as redis:
        redis.client().ping()
        (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef")
        (tmp_path / "url").write_text(redis.url)
        rotate_key_root(tmp_path / "roots", bytes)
        pool = {"name": "decode", "role": "both", "dtype": "fp32", "cpus_per_rank": 0.05}
        pool["engine"] = {"block_tokens": 16}
        yield {
            "name": APP,
            "import_path": "dummy_pools:build",
            "route_prefix": f"/{APP}",
            "external_scaler_enabled": True,
            "args": {
                "secret_file": str(tmp_path / "secret"),
                "redis_url_file": str(tmp_path / "url"),
                "config": {
                    "app": APP,
                    "model": str(TINY),
                    "pools": [pool],
                    "gateway": {"host": "127.0.0.1", "port": free_port(), "admin_port": free_port()},
                    "scaling": {"interval_s": 0.5},
                    "auth": {"key_root_file": str(tmp_path / "roots")},
                },
            },
            "deployments": [
                {"name": "Gateway", "num_replicas": 1, "user_config": {"replicas": {"decode": 2}}}
            ],
        }


@pytest.fixture
def heads() -> Iterator[list[Head]]:
    """For the test to fill; ended after it."""
    started: list[Head] = []
    yield started
    for head in started:
        head.close()


def admin_address(application: dict[str, Any]) -> str:
    return f"127.0.0.1:{application['args']['config']['gateway']['admin_port']}"


def gateway_pool(application: dict[str, Any]) -> admin_pb.Pool | None:
    """The pool as the gateway tells it; None while there is no gateway."""
    try:
        with BlockingAdminClient(admin_address(application)) as client:
            (pool,) = client.status().pools
            return pool
    except CallError:
        return None


def is_held(application: dict[str, Any]) -> bool:
    """Whether the roster knows of the operator's order."""
    pool = gateway_pool(application)
    return pool is not None and (pool.desired, pool.pinned, pool.configured) == (5, True, 2)


def test_a_deploy_stops_none_of_the_replicas_that_were_ordered(
    application: dict[str, Any], heads: list[Head]
) -> None:
    heads.append(first := Head())
    first.deploy(application)
    first.until(lambda: list(first.replicas().values()) == ["RUNNING"] * 2)
    scale = f"/api/v1/applications/{APP}/deployments/{POOL}/scale"
    first.until(lambda: gateway_pool(application) is not None)
    first.ask(scale, {"target_num_replicas": 5}, "POST")
    first.until(lambda: is_held(application) and list(first.replicas().values()) == ["RUNNING"] * 5)

    before = set(first.replicas())
    first.history.clear()
    changed = with_value(application, "args.config.logs", {"format": "json"})
    first.deploy(changed)
    first.until(
        lambda: list(first.replicas().values()) == ["RUNNING"] * 5 and not before & set(first.replicas())
    )
    assert {seen.target for seen in first.history} == {5}
    assert min(seen.num_staying for seen in first.history) >= 5
    first.until(lambda: is_held(changed))

    # Another Ray cluster with the same secret and Redis, as KubeRay starts one for other pods.
    moved = with_value(changed, "args.config.gateway.port", free_port())
    heads.append(second := Head())
    second.deploy(moved)
    second.until(lambda: list(second.replicas().values()) == ["RUNNING"] * 5)
    assert {seen.target for seen in second.history} == {5}
    second.until(lambda: is_held(moved))
