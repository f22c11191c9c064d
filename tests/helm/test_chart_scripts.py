"""The shell that the chart runs in its pods, run here: fetching a model once, waiting for it, Redis."""

from __future__ import annotations

import base64
import os
import signal
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from authority import Authority
from certificates import name_of
from chart_harness import Object, objects, only, pods
from optional_programs import needs_redis_server
from patience import WAIT_S
from redis.backoff import NoBackoff
from redis.retry import Retry
from serving import free_port

from kvtransfer.common.clock import SystemClock
from kvtransfer.store.index.redis_server import find_binary

FETCHED = {"repo": "org/name", "command": ["bash", "fetch.sh"]}
DOWNLOAD = {"source": "download", "download": FETCHED}


def environment(container: Object) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def run(container: Object, folder: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        container["command"],
        cwd=folder,
        env={
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            **environment(container),
            "HOME": str(folder),
            **changed,
        },
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
    assert sorted(path.name for path in place.iterdir()) == [".attempts", ".complete", "model"]


def test_pods_that_wait_for_a_failed_download_say_why_and_end_when_it_has_given_up(tmp_path: Path) -> None:
    def parts(**download: Any) -> tuple[Object, Object]:
        values = {"model": {**DOWNLOAD, "download": {**FETCHED, **download}}}
        items = objects(values)
        (fetch,) = only(items, "Job")["spec"]["template"]["spec"]["containers"]
        (wait,) = dict(pods(items))["pool-decode"]["spec"]["initContainers"]
        return fetch, wait

    fetch, wait = parts(backoffLimit=2)
    assert wait["terminationMessagePolicy"] == "FallbackToLogsOnError"
    place = tmp_path / "model"
    here = {"MODEL_PATH": str(place), "HOME": str(tmp_path)}
    once = {**wait, "command": ["bash", "-c", wait["command"][-1].replace("sleep 5", "exit 9")]}
    (tmp_path / "fetch.sh").write_text('echo "401 for $MODEL: gated" >&2; exit 3')

    assert run(fetch, tmp_path, **here, JOB="first").returncode == 3
    waiting = run(once, tmp_path, **here)
    assert waiting.returncode == 9
    assert waiting.stdout.splitlines() == [
        "the download of org/name@main fails: attempt 1 of 2 ended with status 3 (again soon):",
        "401 for org/name@main: gated",
    ]
    assert run(fetch, tmp_path, **here, JOB="first").returncode == 3
    ended = run(wait, tmp_path, **here)
    assert ended.returncode == 1
    assert "attempt 2 of 2 ended with status 3 (given up):\n401 for org/name@main: gated\n" in ended.stdout
    assert "tokenSecret" in ended.stdout

    # Another Job: what the first one said is over as soon as it runs, and it may succeed.
    (tmp_path / "fetch.sh").write_text('test ! -e "$MODEL_PATH/.failed" && echo whole > "$MODEL_PATH/model"')
    assert run(fetch, tmp_path, **here, JOB="second").returncode == 0
    assert run(wait, tmp_path, **here).returncode == 0


def test_another_pod_of_the_download_is_another_job_and_the_same_one_is_the_same() -> None:
    def seen(values: Object, **download: Any) -> tuple[str, Object]:
        model = {**DOWNLOAD, "download": {**FETCHED, **download}}
        job = only(objects({"model": model, **values}), "Job")
        return job["metadata"]["name"], job["spec"]["template"]

    first = seen({})
    others = [
        seen({}, tokenSecret={"name": "hub"}),
        seen({}, resources={"memory": "4Gi"}),
        seen({}, endpoint="https://mirror"),
        seen({"commonLabels": {"team": "a"}}),
        seen({"image": {"tag": "other"}}),
        seen({"podSecurityContext": {"runAsUser": 7}}),
    ]
    names = [name for name, _ in (first, *others)]
    assert len(set(names)) == len(names)
    assert all(template != first[1] for _, template in others)
    assert max(map(len, names)) <= 63
    assert seen({"gateway": {"replicas": 3}}, ttlSecondsAfterFinished=60) == first
    # Those change with every version of the chart, and a Job's template must not.
    assert not [label for label in first[1]["metadata"]["labels"] if label.startswith("helm.sh/")]
    assert "app.kubernetes.io/version" not in first[1]["metadata"]["labels"]


def test_a_finished_job_goes_when_the_values_say_so() -> None:
    def ttl(**download: Any) -> object:
        model = {**DOWNLOAD, "download": {**FETCHED, **download}}
        return only(objects({"model": model}), "Job")["spec"].get("ttlSecondsAfterFinished")

    assert (ttl(), ttl(ttlSecondsAfterFinished=0), ttl(ttlSecondsAfterFinished=60)) == (None, 0, 60)


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


def test_the_index_has_a_bounded_server_of_its_own(tmp_path: Path) -> None:
    """What grows in it is forgotten, and takes no memory of Ray's control state."""
    items = objects()
    stateful = only(items, "StatefulSet")["spec"]["template"]["spec"]
    servers = {container["name"]: container for container in stateful["containers"]}
    assert servers.keys() == {"redis", "index"}
    (limit,) = servers["index"]["env"]
    assert limit["valueFrom"]["resourceFieldRef"] == {"resource": "limits.memory"}
    url = base64.b64decode(only(items, "Secret", "tandem-redis")["data"]["url"]).decode()
    assert urlsplit(url).port == servers["index"]["ports"][0]["containerPort"] == 6380
    assert "index" in [port["name"] for port in only(items, "Service", "tandem-redis")["spec"]["ports"]]
    data = only(items, "ConfigMap", "tandem-redis")["data"]
    port = free_port()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(find_binary())
    (tmp_path / "password").write_text("secret-of-the-test")
    conf = data["index.conf"].replace("/run/redis", str(tmp_path)).replace("6380", str(port))
    (tmp_path / "index.conf").write_text(f"{conf}\nbind 127.0.0.1\n")
    path = f"{tmp_path / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    server = subprocess.Popen(
        ["sh", "-c", _moved(data["start-index.sh"], tmp_path)],
        env={"PATH": path, "MEMORY_LIMIT": str(1 << 30)},
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_for(port)
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, retry=Retry(NoBackoff(), 0)).ping()
        with redis.Redis(port=port, password="secret-of-the-test") as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
            assert 0.69 < int(client.config_get("maxmemory")["maxmemory"]) / (1 << 30) <= 0.7
            assert client.config_get("appendonly") == {"appendonly": "no"}
        server.terminate()
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()


@needs_redis_server
def test_redis_with_tls_is_reached_by_its_certificate_and_reads_a_renewed_one(tmp_path: Path) -> None:
    data = only(objects({"redis": {"bundled": {"tls": {"enabled": True}}}}), "ConfigMap", "tandem-redis")[
        "data"
    ]
    authority, port = Authority("redis"), free_port()
    authority.issue(tmp_path, "first")
    ca_file = authority.write(tmp_path)
    (tmp_path / "password").write_text("secret-of-the-test")

    def here(text: str) -> str:
        text = _moved(text, tmp_path).replace("/etc/redis-tls", str(tmp_path)).replace("6379", str(port))
        return text.replace("/etc/redis/renew.sh", str(tmp_path / "renew.sh")).replace(
            "sleep 60", "sleep 0.1"
        )

    (tmp_path / "redis.conf").write_text(here(data["redis.conf"]).replace("/data", str(tmp_path)))
    (tmp_path / "renew.sh").write_text(here(data["renew.sh"]))
    ping = here(data["ping.sh"]).replace("redis-cli", f"redis-cli -p {port}")
    server = subprocess.Popen(
        ["sh", "-c", here(data["start.sh"])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for(port)
        with pytest.raises(redis.ConnectionError):
            redis.Redis(port=port, password="secret-of-the-test", retry=Retry(NoBackoff(), 0)).ping()
        with redis.Redis(
            "localhost", port, password="secret-of-the-test", ssl=True, ssl_ca_certs=str(ca_file)
        ) as client:
            assert client.ping()
        assert subprocess.run(["sh", "-c", ping], check=False).returncode == 0
        assert _served_name(port) == "first"
        authority.issue(tmp_path, "second")
        clock = SystemClock()
        end = clock.now() + WAIT_S
        while _served_name(port) != "second":
            assert clock.now() < end, "the renewed certificate is not used"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _served_name(port: int) -> str:
    """The common name of the server's certificate."""
    return name_of(ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("localhost", port))))


def _moved(script: str, folder: Path) -> str:
    """With the container's places in this folder."""
    for place, here in (
        ("/run/redis/index.conf", "run.conf"),
        ("/etc/redis/index.conf", "index.conf"),
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
