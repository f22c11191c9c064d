"""`tandem doctor` as people and programs call it, and the page that lists its checks."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import Pair
from rich.console import Console
from serving import ROOT, TINY, RunningCluster, free_port, tandem
from typer.testing import CliRunner

from cluster.cli.doctor import (
    CONFIG_CHECK,
    REACH_CHECK,
    cluster_checks,
    config_findings,
    findings_view,
    machine_checks,
    summary,
)
from cluster.cli.main import cli
from cluster.doctor.check_context import Check
from cluster.doctor.checks import (
    Finding,
    Severity,
    as_json,
    error,
    exit_status,
    note,
    ok,
    warning,
    worst_first,
)
from cluster.errors import StartError
from cluster.serve.private_folder import PrivateFolder
from cluster.serve.serve_runs import ServeRun, record

KEYS = {"check", "group", "severity", "seen", "why", "remedy", "figures"}
CHECKS: list[Check[Any]] = [*machine_checks(), *cluster_checks()]
NAMES = [check.name for check in CHECKS]


@pytest.fixture(autouse=True)
def no_other_run(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of other tests' clusters on this host is found. The path is short, for Ray's unix sockets."""
    tmp_path_factory.getbasetemp()  # made now: this folder ends with the test, that of pytest must not
    with tempfile.TemporaryDirectory(prefix="d") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield


def checked(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and answer, of the command in this process."""
    done = CliRunner().invoke(cli, ["doctor", "--json", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    assert set(answer) == {"ok", "counts", "findings"}
    assert all(set(finding) == KEYS for finding in answer["findings"])
    assert answer["ok"] == (done.exit_code == 0)
    assert sum(answer["counts"].values()) == len(answer["findings"])
    return done.exit_code, answer


def test_every_check_is_in_the_documentation_with_its_question() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| (.+?) \| (.+?) \|$", (ROOT / "docs/doctor.md").read_text(), re.M
    )
    questions = {check.name: check.question for check in CHECKS}
    assert {name: text for name, text, _ in rows if name in questions} == questions
    assert {name for name, _, _ in rows} - set(questions) == {CONFIG_CHECK, REACH_CHECK}
    assert len(rows) == len(questions) + 2


def test_names_are_given_once() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_findings_are_ordered_counted_and_decide_the_status() -> None:
    results = [ok("fine", a=1), note("hm"), error("broken", "why", "do"), warning("slow", "why", "do")]
    findings = [Finding(f"c{number}", "g", result) for number, result in enumerate(results)]
    assert [item.severity for item in worst_first(findings)] == list(reversed(Severity))
    assert exit_status(findings) == 1
    assert exit_status([item for item in findings if item.severity is not Severity.ERROR]) == 0
    answer = as_json(findings)
    assert answer["counts"] == {"ok": 1, "note": 1, "warning": 1, "error": 1}
    assert answer["findings"][0] == {
        "check": "c2",
        "group": "g",
        "severity": "error",
        "seen": "broken",
        "why": "why",
        "remedy": "do",
        "figures": {},
    }
    assert summary(findings) == "1 error, 1 warning, 1 note, 1 ok"
    assert summary([]) == "nothing was looked at"


def test_people_see_the_worst_group_first_and_every_remedy() -> None:
    findings = [
        Finding("a", "calm", ok("all is [well]")),
        Finding("b", "bad", ok("this too")),
        Finding("c", "bad", error("broken", "because", "mend it")),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(findings_view(findings))
    text = console.export_text()
    order = [
        text.index(word) for word in ("bad", "broken", "because", "-> mend it", "this too", "calm", "[well]")
    ]
    assert order == sorted(order)


def test_the_lines_of_a_wrong_file_are_findings() -> None:
    findings = config_findings("f: pools[0].tp: bad\nf: gateway.port: bad")
    assert [item.result.seen for item in findings] == ["f: pools[0].tp: bad", "f: gateway.port: bad"]


def test_this_very_machine_is_looked_at() -> None:
    """Whatever it is: each check says something or nothing, and none breaks."""
    done = tandem("doctor")
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert "model-weights" in done.stdout
    assert done.stdout.rstrip().endswith("ok")


def run_at(port: int) -> ServeRun:
    return ServeRun(
        app="tandem",
        process_id=1,
        started_at=1.0,
        file="",
        gateways=(f"127.0.0.1:{port}",),
        admins=("127.0.0.1:1",),
        ray="127.0.0.1:2",
        dashboard="",
        token_file="/private/token",
    )


def test_the_running_cluster_that_is_meant_is_looked_at(tmp_path: Path) -> None:
    """It has ended without its record: nothing answers at its addresses."""
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: {TINY}\ngateway: {{port: 7000}}\npools: [{{name: d, role: both}}]\n")
    folders = PrivateFolder(), PrivateFolder()
    record(folders[0], run_at(7000))
    for arguments, is_live in (((), True), (("-f", str(file)), False)):
        _, answer = checked(*arguments)
        seen = {item["check"]: item["seen"] for item in answer["findings"]}
        assert "127.0.0.1:2" in seen["ray-cluster"]
        assert "/private/token" in seen["ray-token"]
        assert (seen.get("gateway", "").startswith("no gateway answers at 127.0.0.1:1")) == is_live
    _, answer = checked("-f", str(file), "--ray-address", "local")
    assert "draws the token" in {item["check"]: item["seen"] for item in answer["findings"]}["ray-token"]
    record(folders[1], run_at(8000))
    _, answer = checked("-f", str(file))
    assert "127.0.0.1:2" in {item["check"]: item["seen"] for item in answer["findings"]}["ray-cluster"]
    file.write_text(file.read_text().replace("7000", "0"))
    with pytest.raises(StartError, match="2 clusters of the application 'tandem' run here"):
        CliRunner().invoke(cli, ["doctor", "-f", str(file)], catch_exceptions=False)
    for folder in folders:
        folder.close()


def test_a_wrong_file_is_an_error_for_each_field(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: {TINY}\npools:\n  - {{name: d, role: decode, tp: 0}}\nstore: {{dram_gb: -1}}\n")
    status, answer = checked("-f", str(file))
    assert status == 1
    assert {item["check"] for item in answer["findings"]} == {"config"}
    assert len(answer["findings"]) == 2


def test_a_taken_port_ends_in_status_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        file = tmp_path / "cluster.yaml"
        gateway = f"{{port: {taken.getsockname()[1]}, console_port: null}}"
        pools = f"[{{name: d, role: decode}}]\ngateway: {gateway}\nstore: {{nvme_path: kv, nvme_gb: 1}}"
        file.write_text(f"model: {TINY}\npools: {pools}\n")
        status, answer = checked("-f", str(file))
    errors = [item for item in answer["findings"] if item["severity"] == "error"]
    assert status == 1
    assert [item["check"] for item in errors] == ["ports"]
    named = {item["check"] for item in answer["findings"]}
    assert {"nvme-room", "nvme-direct-io", "memory", "redis", "ray-token"} <= named <= {*NAMES}


def test_a_gateway_that_is_not_there_is_an_error() -> None:
    status, answer = checked("--admin-address", f"127.0.0.1:{free_port()}", "--seconds", "0")
    assert status == 1
    (finding,) = answer["findings"]
    assert finding["check"] == "gateway"
    assert "does `tandem serve` run there" in finding["remedy"]


async def test_a_gateway_that_is_there_is_looked_at(pair: Pair) -> None:
    status, answer = await asyncio.to_thread(
        checked, "--admin-address", pair.admin.address, "--seconds", "0.1"
    )
    assert status == 0
    named = {item["check"] for item in answer["findings"]}
    assert {"route", "ttft", "replicas", "gateways", "clocks", "versions"} <= named
    assert not named & {check.name for check in machine_checks()}


@pytest.mark.slow
@pytest.mark.cluster
def test_a_running_cluster_is_well_and_says_what_its_prompts_share(tmp_path: Path) -> None:
    """A real one: its own ports and memory count as its own; then prompts that differ at their beginning."""
    port = free_port()
    file = tmp_path / "cluster.yaml"
    pools = "[{name: prefill, role: prefill}, {name: decode, role: decode}]"
    file.write_text(f"model: {TINY}\npools: {pools}\ngateway: {{port: {port}, console_port: null}}\n")
    cluster = RunningCluster("-f", str(file))
    try:
        text = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. " * 12
        for number in range(12):
            done = tandem(
                "generate", f"{number * 7919:012d} {text}", "--address", cluster.address, "--max-tokens", "4"
            )
            assert done.returncode == 0, done.stderr
        status, answer = checked("-f", str(file), "--admin-address", cluster.admin_address)
        by_check = {item["check"]: item for item in answer["findings"]}
        assert status == 0, [item for item in answer["findings"] if item["severity"] == "error"]
        assert by_check["ports"]["severity"] == "ok"
        assert by_check["route"]["severity"] == "ok"
        assert by_check["ttft"]["severity"] in ("ok", "warning")
        assert by_check["paths"]["severity"] == "ok"
        assert by_check["hit-rate"]["figures"]["cause"] == "diverging"
        assert by_check["hit-rate"]["figures"]["diverge_at_token"] == 0
        assert by_check["clocks"]["severity"] == "ok"
    finally:
        assert cluster.stop() == 0
