"""How `tests/gpu/run` runs files and reports them, without a card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from import_path import import_path

from benchmarks.gpu import PARTS
from tests.gpu.stages import (
    ALL_FIGURES,
    ALONE,
    FIGURES,
    SIDE_BY_SIDE,
    Row,
    Stages,
    environment,
    figures_in,
    parts,
    pytest_command,
    table,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_it_says_so() -> None:
    done = subprocess.run(
        [ROOT / "tests/gpu/run"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "finds no CUDA device" in done.stdout
    assert done.stdout.count("\n") == 1


def test_figures_run_instead_of_the_tests(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "tests/gpu/run", "--cpu", "--figures", "decode,no-such-part", "--out", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert {path.stem for path in tmp_path.glob("*.txt")} == {"figures of decode", "figures of no-such-part"}
    assert "unknown parts no-such-part" in (tmp_path / "figures of no-such-part.txt").read_text()
    assert '"part": "limits"' in (tmp_path / "figures of decode.txt").read_text()
    verdicts = [line.split(":")[0].split() for line in done.stdout.splitlines() if "measured  " in line]
    assert verdicts == [["not", "measured", "limits"], ["not", "measured", "no-such-part"]]


def test_each_part_of_the_benchmark_has_its_turn_and_each_target_its_verdict() -> None:
    assert sorted(ALL_FIGURES) == sorted(PARTS)
    assert set(FIGURES) < set(PARTS)
    lines = [
        '{"part": "decode", "figure": "decode_ms", "value": 5, "limit": 4.5, "ratio": 0.9, "target": 0.88}',
        '{"part": "limits", "figure": "copy_gb_s", "value": 3000}',
        "a line of a library",
        "{another}",
        "3",
        '{"part": "served", "figure": "start_s", "value": 50, "limit": 40, "ratio": 0.8, "target": 1.0}',
        '{"part": "start", "error": "no memory"}',
    ]
    assert [" ".join(figure.text.split()) for figure in figures_in("\n".join(lines))] == [
        "met decode: decode_ms, 0.9 of the limit, target 0.88",
        "MISSED served: start_s, 0.8 of the limit, target 1",
        "not measured start: no memory",
    ]


def test_every_file_of_the_suite_runs_in_a_stage() -> None:
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests/gpu").glob("test_*.py")}
    # The benchmark's own figures are a stage.
    assert sorted([*SIDE_BY_SIDE, *ALONE]) == sorted(files - {"benchmark"})


def test_the_parts_of_a_file_have_each_test_once() -> None:
    def collected(name: str) -> list[str]:
        done = subprocess.run(
            [*pytest_command(name), "--collect-only"],
            cwd=ROOT,
            env=environment(None),
            capture_output=True,
            text=True,
            check=True,
        )
        return [line for line in done.stdout.splitlines() if "::" in line]

    assert parts(["memory", "decoder"]) == ["memory", "decoder-1of2", "decoder-2of2"]
    of_parts = [set(collected(f"kernel_times-{part}of2")) for part in (1, 2)]
    assert all(of_parts)
    assert sum(map(len, of_parts)) == len(set.union(*of_parts)) == len(collected("kernel_times"))


def test_what_fails_hangs_or_has_no_time_left_is_a_row(tmp_path: Path) -> None:
    stages = Stages(tmp_path, os.environ)

    def run(name: str, program: str, limit_s: float) -> str:
        return stages.run(name, [sys.executable, "-c", program], limit_s).result

    assert run("good", "print('3 passed, 1 skipped in 0.1s')", 60) == "ok"
    assert run("bad", "print('1 failed, 2 passed'); raise SystemExit(1)", 60) == "FAILED"
    assert stages.run("none", ["true"], 1).result == "not run"
    assert [row.detail for row in stages.rows] == [
        "3 passed, 1 skipped",
        "1 failed, 2 passed",
        "no time was left",
    ]
    assert (tmp_path / "bad.txt").read_text().startswith("1 failed")
    assert [line.split()[0] for line in table(stages.rows).splitlines()] == ["bad", "none", "good"]
    assert "hung" in table([Row("hung", "timeout", 170.0, "ended after 170 s")])


def test_children_import_what_their_parent_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages may come by PYTHONPATH: a machine without a registry has no other way."""
    monkeypatch.setenv("PYTHONPATH", f"/packages{os.pathsep}/more")
    assert import_path("/root", Path("/support")).split(os.pathsep) == [
        "/root",
        "/support",
        "/packages",
        "/more",
    ]
    assert environment(tmp_path)["PYTHONPATH"].split(os.pathsep) == [
        str(ROOT),
        str(tmp_path),
        "/packages",
        "/more",
    ]
    monkeypatch.delenv("PYTHONPATH")
    assert import_path("/root") == "/root"


def test_no_test_replaces_the_import_path() -> None:
    """But those that run in environments of other people's packages."""
    allowed = {"tests/clients/test_clients.py", "tests/cluster/admission/test_shared_quotas.py"}
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        for line in path.read_text().splitlines()
        if '"PYTHONPATH"' in line and (": " in line or "] =" in line) and "import_path(" not in line
    }
    assert (
        found - allowed - {"tests/gpu/stages.py", "tests/test_gpu_suite.py", "tests/test_gpu_stages.py"}
        == set()
    )
