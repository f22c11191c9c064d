"""Two `tandem serve` on one host, beside another user who looks like a Ray cluster: each has a Ray of its
own, other commands find the one they are pointed at, and each ends alone."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from patience import SETTLE_S, SLACK_S
from serving import ROOT, TINY, RunningCluster, environment, free_port, tandem
from stranger import Stranger

from cluster.api.blocking_client import BlockingClient
from cluster.api.generate_options import GenerateOptions
from cluster.serve.private_folder import living_folders
from cluster.serve.ray_owner import own_ray_clusters
from cluster.serve.serve_runs import living_runs
from kvtransfer.common.clock import SystemClock

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a process of another user"),
]
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
# From the first start on, the other user's process listens that long at least.
STRANGER_S = 60.0
# How long a joined Ray cluster may have ended before it is noticed.
NOTICED_S = 5.0
FILE = """\
app: {app}
model: {model}
pools: [{{name: both, role: both, dtype: fp32, cpus_per_rank: 0.1, engine: {{block_tokens: 16}}}}]
gateway: {{port: {port}, drain_s: {drain_s}}}
"""


class Two(NamedTuple):
    """Both clusters, and their files."""

    first: RunningCluster
    second: RunningCluster
    first_file: Path
    second_file: Path


def written(file: Path, *, app: str = "tandem", port: int = 0, drain_s: int = 120) -> Path:
    file.write_text(FILE.format(app=app, model=TINY, port=port, drain_s=drain_s))
    return file


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Started as without an option for Ray, while the stranger listens."""
    folder, clock = tmp_path_factory.mktemp("two"), SystemClock()
    files = [written(folder / f"{name}.yaml", port=free_port()) for name in ("first", "second")]
    began = clock.now()
    with Stranger(f"127.0.0.1:{free_port()}") as stranger:
        first, second = (
            RunningCluster("--file", str(file), ray_address="", start_s=SETTLE_S) for file in files
        )
        yield Two(first, second, *files)
        threading.Event().wait(max(0.0, began + STRANGER_S - clock.now()))
        assert stranger.close() == [], "nobody has even connected to another user's process"
    for cluster in (first, second):
        cluster.stop()


def answers(cluster: RunningCluster) -> bool:
    with BlockingClient(cluster.address) as client:
        done = client.complete("one", GenerateOptions(max_tokens=4), timeout_s=60)
    return len(done.token_ids[0]) == 4


def private_folder(cluster: RunningCluster) -> Path:
    return Path(cluster.ray_variables["RAY_AUTH_TOKEN_PATH"]).parent


def test_both_answer_from_a_ray_of_their_own(two: Two) -> None:
    assert answers(two.first)
    assert answers(two.second)
    assert two.first.addresses["Ray"] != two.second.addresses["Ray"]
    assert private_folder(two.first) != private_folder(two.second)
    assert not any(line.startswith("joined") for line in two.first.lines + two.second.lines)


def test_nothing_listens_but_on_loopback(two: Two) -> None:
    """The gateways' host is loopback by default, so no port of Ray's is open to the network either."""
    listening = [
        connection.laddr
        for cluster in (two.first, two.second)
        for process in cluster.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 30
    assert [place for place in listening if place.ip not in LOOPBACK] == []
    assert len({place.port for place in listening}) == len(listening), "no port is shared"


def test_no_other_user_enters_the_folder_of_tokens_logs_and_sockets(two: Two) -> None:
    for cluster in (two.first, two.second):
        folder = private_folder(cluster)
        for path in (folder, folder.parent):
            assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) == (0o700, os.getuid())
        assert Path(cluster.addresses["logs"]).is_relative_to(folder)
        for path in folder.iterdir():
            if path.is_file():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        for process in cluster.processes():
            for connection in process.net_connections("unix"):
                path = Path(str(connection.laddr))
                assert not path.is_absolute() or path.is_relative_to(folder) or is_shut(path), path


def is_shut(path: Path) -> bool:
    return not path.exists() or any(not it.stat().st_mode & 0o011 for it in path.parents)


def test_rays_own_folder_and_token_are_not_used(two: Two) -> None:
    assert two.first.ray_variables != two.second.ray_variables
    opened = {
        file.path for cluster in two[:2] for process in cluster.processes() for file in process.open_files()
    }
    assert not [path for path in opened if path.startswith(("/tmp/ray/", str(Path.home() / ".ray")))]


def test_the_records_name_both(two: Two) -> None:
    runs = {run.ray: run for run in living_runs()}
    for cluster, file in ((two.first, two.first_file), (two.second, two.second_file)):
        run = runs[cluster.addresses["Ray"]]
        assert (run.file, run.gateways, run.admins) == (
            str(file),
            (cluster.address,),
            (cluster.admin_address,),
        )
        assert run.process_id == cluster.processes()[0].pid
        assert run.dashboard == cluster.addresses["dashboard"]
    found = own_ray_clusters()
    assert {two.first.addresses["Ray"], two.second.addresses["Ray"]} <= set(found)


def test_an_update_finds_the_cluster_of_its_file(two: Two) -> None:
    for cluster, file in ((two.first, two.first_file), (two.second, two.second_file)):
        changed = file.with_name(f"changed-{file.name}")
        changed.write_text(file.read_text().replace("drain_s: 120", "drain_s: 60"))
        done = tandem("update", "-f", str(changed), "--dry-run", "--json")
        assert done.returncode == 0, done.stderr
        assert f"joining the Ray cluster at {cluster.addresses['Ray']} (process " in done.stderr
        assert [change["path"] for change in json.loads(done.stdout)["changes"]] == ["gateway.drain_s"]


def test_an_update_that_may_mean_both_asks(two: Two, tmp_path: Path) -> None:
    done = tandem("update", "-f", str(written(tmp_path / "neither.yaml")), "--dry-run")
    assert done.returncode == 1
    assert "clusters of the application 'tandem' run here" in done.stderr
    assert two.first.addresses["Ray"] in done.stderr
    assert "name one with --ray-address HOST:PORT" in done.stderr
    done = tandem("update", "-f", str(written(tmp_path / "none.yaml", app="absent")), "--dry-run")
    assert done.returncode == 1
    assert "no `tandem serve` of this user runs the application 'absent'" in done.stderr


def test_the_doctor_looks_at_the_one_of_its_file(two: Two) -> None:
    done = tandem("doctor", "-f", str(two.second_file), "--json")
    findings = {item["check"]: item for item in json.loads(done.stdout)["findings"]}
    assert two.second.addresses["Ray"] in findings["ray-cluster"]["seen"]
    assert str(private_folder(two.second)) in findings["ray-token"]["seen"]
    assert findings["ports"]["severity"] != "error", "they are its own"


def test_scaling_through_the_dashboard_uses_the_token_of_its_cluster(two: Two) -> None:
    arguments = ("scale", "both=1", "--dry-run", "--json", "--dashboard", two.second.addresses["dashboard"])
    done = tandem(*arguments)
    assert done.returncode == 0, done.stderr


def test_auto_asks_which_of_them_is_meant(two: Two) -> None:
    done = tandem("serve", "-f", str(two.first_file), "--ray-address", "auto", "--port", "0")
    assert done.returncode == 1
    assert "Ray clusters of this user run here" in done.stderr
    assert two.second.addresses["Ray"] in done.stderr


def test_ray_address_is_followed_only_with_a_word_about_it(two: Two, tmp_path: Path) -> None:
    """The joined Ray is the second's, which is killed then: noticed soon, and said in one sentence."""
    file = written(tmp_path / "v2.yaml", app="tandem-v2")
    address = two.second.addresses["Ray"]
    joined = RunningCluster(
        "--file", str(file), ray_address="", variables={"RAY_ADDRESS": address}, start_s=SETTLE_S
    )
    (line,) = [line for line in joined.lines if line.startswith("joined ")]
    assert line.startswith(f"joined the Ray cluster at {address} (process ")
    assert ", started by " in line
    assert line.endswith("; RAY_ADDRESS names it\n")
    assert joined.ray_variables == two.second.ray_variables
    assert answers(joined)

    run = next(run for run in living_runs() if run.app == "tandem-v2")
    (own,) = [
        folder for folder in living_folders() if str(run.process_id) in (folder / "run.json").read_text()
    ]
    killed, family = private_folder(two.second), two.second.processes()
    process, clock = joined.processes()[0], SystemClock()
    at = clock.now()
    family[0].kill()
    assert process.wait(30) == 1
    took_s = clock.now() - at
    joined.stop()
    assert took_s < NOTICED_S + SLACK_S
    assert joined.lines[-1].startswith(f"tandem: the Ray cluster at {address} (process ")
    assert "which was joined, has ended" in joined.lines[-1]
    assert "Traceback" not in "".join(joined.lines)
    assert not own.exists()
    psutil.wait_procs(family, timeout=20)
    assert killed.exists()

    assert answers(two.first), "it has nothing to do with the others"
    code = "from cluster.serve.private_folder import PrivateFolder; PrivateFolder().close()"
    subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, check=True)
    assert not killed.exists(), "the next start removes what a killed run has left"


def test_the_first_ends_alone(two: Two) -> None:
    folder = private_folder(two.first)
    assert two.first.stop() == 0
    assert two.first.lines[-1] == "stopped\n"
    assert not folder.exists()
