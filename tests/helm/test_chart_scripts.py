"""The shell that the chart runs in its pods, run here: fetching a model once, waiting for it, Redis."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis
from chart_house import Object, objects, only, pods
from optional_programs import needs_redis_server
from patience import WAIT_S
from redis.backoff import NoBackoff
from redis.retry import Retry
from serving import free_port

from kvtransfer.clock import SystemClock

FETCHED = {"repo": "org/name", "command": ["bash", "fetch.sh"]}
DOWNLOAD = {"source": "download", "download": FETCHED}


def environment(container: Object) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def run(container: Object, folder: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        container["command"],
        cwd=folder,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", **environment(container), **changed},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_a_model_is_fetched_once_and_then_waited_for_no_more(tmp_path: Path) -> None:
    items = objects({"model": DOWNLOAD})
    (job,) = [item for item in items if item["kind"] == "Job"]
    (fetch,) = job["spec"]["template"]["spec"]["containers"]
    (wait,) = dict(pods(items))["pool-decode"]["spec"]["initContainers"]
    # Both name the same folder: one from the volume's root, the other by its own mount.
    (mount,) = [mount for mount in wait["volumeMounts"] if mount["name"] == "model"]
    place = tmp_path / mount["subPath"]
    assert environment(fetch)["MODEL_PATH"] == f"/volume/{mount['subPath']}"
    script = tmp_path / "fetch.sh"

    script.write_text('echo run >> runs; echo half > "$MODEL_PATH/model"; exit 3')
    assert run(fetch, tmp_path, MODEL_PATH=str(place)).returncode == 3
    assert not (place / ".complete").exists()
    script.write_text('echo run >> runs; echo whole > "$MODEL_PATH/model"')
    for _ in range(2):
        done = run(fetch, tmp_path, MODEL_PATH=str(place))
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs").read_text().split() == ["run"] * 2
    assert (place / "model").read_text() == "whole\n"
    assert run(wait, tmp_path, MODEL_PATH=str(place)).stdout == ""


def test_pods_wait_for_the_revision_that_they_serve(tmp_path: Path) -> None:
    (wait,) = dict(pods(objects({"model": DOWNLOAD})))["headgroup"]["spec"]["initContainers"]
    (tmp_path / ".complete").write_text("org/name@another\n")
    command = wait["command"][-1].replace("sleep 5", "exit 9")
    done = run({**wait, "command": ["bash", "-c", command]}, tmp_path, MODEL_PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (9, "waiting for org/name@main\n")


def test_another_revision_lies_beside_the_old_and_is_fetched_by_another_job() -> None:
    def seen(**download: Any) -> tuple[str, str, str]:
        items = objects({"model": {**DOWNLOAD, "download": {**FETCHED, **download}}})
        (job,) = [item for item in items if item["kind"] == "Job"]
        (fetch,) = job["spec"]["template"]["spec"]["containers"]
        claim = only(items, "PersistentVolumeClaim")["metadata"]
        assert claim["annotations"]["helm.sh/resource-policy"] == "keep"
        return job["metadata"]["name"], environment(fetch)["MODEL_PATH"], claim["name"]

    first, second = seen(), seen(revision="v2")
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]
    assert seen() == first


@needs_redis_server
@pytest.mark.parametrize("is_persistent", [True, False])
def test_the_bundled_redis_wants_its_password_and_never_evicts(tmp_path: Path, is_persistent: bool) -> None:
    values = {"redis": {"bundled": {"persistence": {"enabled": is_persistent}}}}
    items = objects(values)
    data = only(items, "ConfigMap", "tandem-redis")["data"]
    port = free_port()
    (tmp_path / "password").write_text("secret-of-the-test")
    conf = data["redis.conf"].replace("/data", str(tmp_path))
    (tmp_path / "redis.conf").write_text(f"{conf}\nport {port}\nbind 127.0.0.1\n")
    start, ping = (_moved(data[name], tmp_path) for name in ("start.sh", "ping.sh"))
    ping = ping.replace("redis-cli", f"redis-cli -p {port}")
    server = subprocess.Popen(["sh", "-c", start], stdout=subprocess.DEVNULL)
    try:
        _wait_for(port)
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, retry=Retry(NoBackoff(), 0)).ping()
        with redis.Redis(port=port, password="secret-of-the-test") as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("appendonly") == {"appendonly": "yes" if is_persistent else "no"}
        assert subprocess.run(["sh", "-c", ping], check=False).returncode == 0
        assert (tmp_path / "run.conf").stat().st_mode & 0o077 == 0
        server.terminate()  # as the kubelet does, to the first process of the container
        assert server.wait(WAIT_S) == 0
        assert subprocess.run(["sh", "-c", ping], check=False, capture_output=True).returncode != 0
    finally:
        server.kill()
        server.wait()


def _moved(script: str, folder: Path) -> str:
    """With the container's places in this folder."""
    for place, here in (
        ("/run/redis/redis.conf", "run.conf"),
        ("/etc/redis-secret/password", "password"),
        ("/etc/redis/redis.conf", "redis.conf"),
    ):
        script = script.replace(place, str(folder / here))
    return script


def _wait_for(port: int) -> None:
    clock = SystemClock()
    end = clock.now() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert clock.now() < end, "redis-server does not listen"
