"""A cluster as a user runs it: `tandem serve` in a process of its own, reached over gRPC alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from child_processes import killed_on_error
from import_path import import_path
from patience import SETTLE_S, START_S, WAIT_S

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.api.blocking_client import BlockingAdminClient
from cluster.errors import CallError
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.clock import SystemClock

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = ROOT / "models" / "tiny"
STOP_S = WAIT_S
_IS_UP = "Ctrl-C"
_COUNTERS = """
import json, logging, sys
import ray
from ray._private.internal_api import node_stats
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
(node,) = ray.nodes()
stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
names = "object_store_bytes_used", "cumulative_created_objects", "cumulative_created_bytes"
print(json.dumps({name: getattr(stats, name) for name in names}))
"""


def write_long_llama(folder: Path, hidden_size: int) -> Path:
    """Write a model of random weights and the bundled tokenizer, for streams of up to 32k tokens; return its
    folder."""
    write_random_checkpoint(
        folder,
        "llama",
        seed=5,
        tokenizer_from=TINY,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32_768,
    )
    return folder


def tandem(*arguments: str, timeout_s: float = START_S) -> subprocess.CompletedProcess[str]:
    """Run a command of the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def environment() -> dict[str, str]:
    """Return our environment, in which the sources are importable from each process; nothing points to
    another Ray or Redis."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "REDIS_URL")}
    return {**kept, "PYTHONPATH": import_path(ROOT), "COLUMNS": "120"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RunningCluster:
    """`tandem serve`, started; `addresses` is what it printed: gateway, HTTP, admin, console, Ray, dashboard,
    Ray token, logs."""

    def __init__(
        self,
        *arguments: str,
        start_s: float = START_S,
        ray_address: str = "local",
        own_group: bool = False,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] = {},
    ) -> None:
        """`own_group`: a signal to its process group does not reach us. `prefix` is a command that runs
        another one, on another host for example; `variables` are added to the environment. A gateway that is
        replaced keeps its port for operators where that for clients is given. `ray_address` "": as without
        that option."""
        if "--port" in arguments and "--admin-port" not in arguments:
            arguments = (*arguments, "--admin-port", str(free_port()))
        self._clock = SystemClock()
        ray = ("--ray-address", ray_address) if ray_address else ()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "cluster", "serve", *ray, *arguments],
            cwd=ROOT,
            env={**environment(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0 if own_group else None,
        )
        self.lines: list[str] = []
        self._ended_or_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with killed_on_error(self._process):
            self._ended_or_ready.wait(start_s)
            if not any(line.startswith(_IS_UP) for line in self.lines):
                self.stop()
                raise AssertionError("tandem serve did not come up:\n" + "".join(self.lines))
        pattern = re.compile(r"(gateway|HTTP|admin|console|Ray token|Ray|dashboard|logs)\s+(\S.*)")
        self.addresses: dict[str, str] = {
            match[1]: match[2] for line in self.lines if (match := pattern.match(line))
        }

    @property
    def address(self) -> str:
        return self.addresses["gateway"]

    @property
    def admin_address(self) -> str:
        return self.addresses["admin"]

    @property
    def ray_variables(self) -> dict[str, str]:
        """The environment of a process that joins the Ray cluster by Ray's own means (docs/operating.md)."""
        path = self.addresses["Ray token"].removeprefix("in ")
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": path,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }

    def status(self) -> admin_pb.StatusResponse:
        with BlockingAdminClient(self.admin_address) as client:
            return client.status()

    def replica(self, role: str) -> admin_pb.Replica:
        """Return the first replica of this role."""
        return next(
            replica
            for replica in self.status().replicas
            if replica.role == value_of(admin_pb.ReplicaRole, role)
        )

    def wait_for(
        self, condition: Callable[[admin_pb.StatusResponse], bool], timeout_s: float = SETTLE_S
    ) -> admin_pb.StatusResponse:
        """Return the first status that fulfils the condition."""
        deadline = self._clock.now() + timeout_s
        pause = threading.Event()
        status = None
        while self._clock.now() < deadline:
            try:
                status = self.status()
            except CallError:
                status = None
            if status is not None and condition(status):
                return status
            pause.wait(0.2)
        raise AssertionError(f"not within {timeout_s} s; last seen: {status}")

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Return our series as Prometheus finds and reads them now: name to (labels, value)."""
        found = Path(self.addresses["logs"]).parent / "prom_metrics_service_discovery.json"
        series: dict[str, list[tuple[dict[str, str], float]]] = {}
        for address in (address for group in json.loads(found.read_text()) for address in group["targets"]):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
                text = reply.read().decode()
            for name, labels, value in re.findall(r"^(ray_tandem_\w+){(.*)} (\S+)$", text, re.MULTILINE):
                series.setdefault(name, []).append(
                    (dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
                )
        return series

    def log(self) -> str:
        """Return the logs of all processes of the service."""
        return "".join(file.read_text() for file in Path(self.addresses["logs"]).glob("worker-*.err"))

    def processes(self) -> list[psutil.Process]:
        """Return all processes below `tandem serve`, itself included."""
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def stop(self) -> int:
        """Stop the service with Ctrl-C; return the exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        with killed_on_error(self._process):
            status = self._process.wait(STOP_S)
        self._reader.join()
        return status

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if line.startswith(_IS_UP):
                self._ended_or_ready.set()
        self._process.stdout.close()
        self._ended_or_ready.set()


def object_store_counters(cluster: RunningCluster) -> dict[str, Any]:
    """Return what Ray's object stores have ever held and hold now, asked by another process of the Ray
    cluster."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNTERS, cluster.addresses["Ray"]],
        env={**environment(), **cluster.ray_variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    counters: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counters
