"""No secret of a running cluster is where others than its own processes could read it: in Ray's GCS, in
command lines, in environments, in logs."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import yaml
from inner_tls import certified
from optional_programs import uses_redis_or_valkey
from serving import ROOT, TINY, RunningCluster, environment, free_port

from cluster.api.blocking_client import BlockingClient
from cluster.api.generate_options import GenerateOptions
from kvtransfer.rpc.trust import Trust, TrustFiles
from kvtransfer.store.index.redis_server import server_password

pytestmark = [pytest.mark.cluster, pytest.mark.slow, uses_redis_or_valkey]

# Prints every key and value of Ray's GCS, of all namespaces, and the arguments of what Serve keeps, as JSON.
_GCS = """
import json, sys
import ray
from ray.experimental import internal_kv
ray.init(address=sys.argv[1], log_to_driver=False)
names = [None, b"tandem", b"serve", b"fun", b"session", b"tracing", b"workflow", b"cluster"]
found = []
for name in names:
    for key in internal_kv._internal_kv_list(b"", namespace=name):
        found.append((key + b" = " + (internal_kv._internal_kv_get(key, namespace=name) or b"")).hex())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    tls = certified(tmp_path_factory.mktemp("tls")).tls
    assert tls is not None
    config = {
        "model": str(TINY),
        "pools": [
            {"name": role, "role": role, "engine": {"block_tokens": 16}} for role in ("prefill", "decode")
        ],
        "transfer": {"transports": ["tcp"]},
        "router": {"skip_prefill_tokens": 0},
        "store": {"dram_gb": 0.05},
        "inner_tls": msgspec.structs.asdict(tls),
        "gateway": {"port": free_port()},
    }
    file = tmp_path_factory.mktemp("serve") / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    cluster = RunningCluster("--file", str(file))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def gcs(running: RunningCluster) -> list[bytes]:
    """What Ray's GCS holds."""
    listed = subprocess.run(
        [sys.executable, "-c", _GCS, running.addresses["Ray"]],
        cwd=ROOT,
        env={**environment(), **running.ray_variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 0, listed.stderr[-2000:]
    return [bytes.fromhex(text) for text in json.loads(listed.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def secret_file(gcs: list[bytes]) -> Path:
    """The file of the secret that was drawn."""
    deployed = b"".join(value for value in gcs if b"deployed/tandem" in value)
    found = re.search(rb'"secret_file":"([^"]+)"', deployed)
    assert found, "what was deployed is looked at"
    assert b"tandem-index@" in deployed
    return Path(found[1].decode())


@pytest.fixture(scope="module")
def secrets(secret_file: Path) -> list[bytes]:
    """The drawn secret, and what is derived from it."""
    trust = Trust.read(TrustFiles(str(secret_file)))
    return [trust.secret, server_password(trust).encode()]


def test_a_request_moves_over_connections_with_certificates(running: RunningCluster) -> None:
    """Here in the event loops of Ray's actors."""
    with BlockingClient(running.address) as client:
        done = client.complete("one two three " * 20, GenerateOptions(max_tokens=4), timeout_s=60)
    assert done.finished.timing.transport == "tcp"
    assert done.finished.timing.transfer_bytes > 0
    assert len(done.token_ids[0]) == 4


def test_the_gcs_knows_paths_only(gcs: list[bytes], secrets: list[bytes]) -> None:
    assert [value for value in gcs if any(secret in value for secret in secrets)] == []


def test_neither_a_command_line_nor_an_environment_shows_a_secret(
    running: RunningCluster, secrets: list[bytes]
) -> None:
    assert running.status().replicas
    seen = 0
    for process in psutil.process_iter():
        for name in ("cmdline", "environ"):
            try:
                text = Path(f"/proc/{process.pid}/{name}").read_bytes()
            except OSError:
                continue
            seen += bool(text)
            assert not any(secret in text for secret in secrets), f"{name} of process {process.pid}"
    assert seen > 10


def test_no_log_shows_a_secret(running: RunningCluster, secrets: list[bytes]) -> None:
    files = [path for path in Path(running.addresses["logs"]).rglob("*") if path.is_file()]
    assert len(files) > 5
    texts = [path.read_bytes() for path in files] + ["".join(running.lines).encode()]
    assert not [text for text in texts if any(secret in text for secret in secrets)]


def test_the_private_folder_is_this_users_and_goes_with_the_cluster(
    running: RunningCluster, secret_file: Path
) -> None:
    for path, mode in ((secret_file, 0o600), (secret_file.parent, 0o700)):
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) == (mode, os.getuid())
    running.stop()
    assert not secret_file.parent.exists()
