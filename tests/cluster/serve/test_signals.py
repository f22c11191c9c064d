"""How `tandem` ends: by a signal to itself, to its process group or to everything, at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from import_path import import_path
from ray._private import services
from serving import ROOT, TINY, RunningCluster, environment

from cluster.api.blocking_client import BlockingClient
from cluster.api.generate_options import GenerateOptions
from cluster.serve.ray_private import out_of_reach
from kvtransfer.common.clock import SystemClock

DRAIN_S = 20.0
# How long the end may take after the drain, which a stream need not use up.
END_S = 10.0
SIGNAL_AT = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})
        return None

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("number", "module", "says"),
    [
        (signal.SIGINT, "cluster.api.client", ""),
        (signal.SIGTERM, "typer", ""),
        (signal.SIGINT, "grpc", ""),
        (signal.SIGTERM, "cluster.serve.launcher", "interrupted while starting"),
        pytest.param(signal.SIGINT, "ray", "interrupted while starting", marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_the_imports_ends_it_quietly(
    tmp_path: Path, number: signal.Signals, module: str, says: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_AT.format(module=module, number=int(number)))
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "serve", "--model", str(TINY), "--ray-address", "local"],
        cwd=ROOT,
        env={**environment(), "PYTHONPATH": import_path(tmp_path, ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 128 + number, done.stderr
    reported = [
        line for line in (done.stdout + done.stderr).splitlines() if line not in ("starting", "stopping")
    ]
    assert reported == ([f"tandem: {says}"] if says else [])


def test_rays_processes_are_out_of_reach_of_a_signal_to_our_group() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    command = [sys.executable, "-c", "import os; print(os.environ['RAY_gcs_rpc_server_reconnect_timeout_s'])"]
    started: list[subprocess.Popen[bytes]] = []
    with out_of_reach(started.append):
        services.ray._private.utils.set_sigterm_handler(lambda *_: None)
        read, write = os.pipe()
        with open(read) as output, open(write, "w") as sink:
            info = services.start_ray_process(command, "test", fate_share=True, stdout_file=sink)
            process = info.process
            assert os.getsid(process.pid) == process.pid != os.getsid(0)
            assert process.wait(30) == 0
            sink.close()
            assert 0 < int(output.read()) < END_S
    assert [it.pid for it in started] == [process.pid]
    assert signal.getsignal(signal.SIGTERM) is handler
    after = services.start_ray_process([sys.executable, "-c", ""], "test", fate_share=True).process
    assert os.getsid(after.pid) == os.getsid(0)
    assert after.wait(30) == 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    common = "dtype: fp32, cpus_per_rank: 0.1, engine: {block_tokens: 16}"
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"model: {TINY}\n"
        "pools:\n"
        f"  - {{name: both, role: both, drain_s: {DRAIN_S}, {common}}}\n"
        f"gateway: {{port: 0, drain_s: {DRAIN_S}}}\n"
    )
    running = RunningCluster("--file", str(file), own_group=True)
    yield running
    running.stop()


def ended_within(cluster: RunningCluster, family: list[psutil.Process], limit_s: float) -> int:
    """Wait for all; the exit status of `tandem serve`, the first of them."""
    _, alive = psutil.wait_procs(family[1:], timeout=limit_s)
    assert alive == [], "".join(cluster.lines)
    status = family[0].wait(END_S)
    cluster.stop()  # nothing any more, but reading what it said
    return int(status)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_signal_to_the_whole_group_lets_streams_finish(cluster: RunningCluster) -> None:
    family, clock, texts = cluster.processes(), SystemClock(), []
    began = threading.Event()

    def stream() -> None:
        options = GenerateOptions(max_tokens=300, ignore_eos=True)
        with BlockingClient(cluster.address) as client:
            for _ in client.generate("x", options, timeout_s=DRAIN_S):
                began.set()
            texts.append("whole")

    client = threading.Thread(target=stream)
    client.start()
    assert began.wait(30)
    at = clock.now()
    os.killpg(family[0].pid, signal.SIGTERM)
    status = ended_within(cluster, family, DRAIN_S + END_S)
    client.join()
    assert status == 0, "".join(cluster.lines)
    assert cluster.lines[-1] == "stopped\n"
    assert texts == ["whole"]
    assert clock.now() - at < DRAIN_S + END_S


@pytest.mark.slow
@pytest.mark.cluster
def test_ray_that_is_ended_under_it_ends_it_soon_and_says_so(cluster: RunningCluster) -> None:
    """As happens where a supervisor signals all processes of the service: Ray's may be gone first."""
    family = cluster.processes()
    for process in family:
        if process.name() == "gcs_server":
            process.kill()
    assert ended_within(cluster, family, END_S) == 1
    assert "KillMode=mixed" in cluster.lines[-1]
    assert "Traceback" not in "".join(cluster.lines)


@pytest.mark.slow
@pytest.mark.cluster
def test_nothing_outlives_a_killed_serve(cluster: RunningCluster) -> None:
    family = cluster.processes()
    family[0].kill()
    assert ended_within(cluster, family, END_S) == -signal.SIGKILL
