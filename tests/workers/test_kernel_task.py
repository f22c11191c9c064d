"""The child that compiles kernels beside a rank's start: its report, its failures, and its end."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from rank_specs import cuda_spec

from kvtransfer.common.clock import ManualClock
from workers.messages.rank_channel import RankSpec
from workers.rank.kernel_task import KernelReport, KernelTask, has_task, naming_kernels

REPORT = '{"num_variants": 15, "num_compiled": 3, "kernel_to_error": {"_rows_kernel": "spills"}}'


@pytest.fixture
def spec(tmp_path: Path) -> RankSpec:
    return cuda_spec(tmp_path)


def child(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_the_report_of_the_child(spec: RankSpec, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.rank")
    reads = (
        "import sys; from workers.rank.start import read_spec; s = read_spec(sys.stdin.buffer);"
        f"print('{REPORT}') if s.max_sequences == 3 else sys.exit(1)"
    )
    clock = ManualClock(5.0)
    with KernelTask(spec, clock, child(reads)) as task:
        clock.advance(4.0)
        report = task.wait()
        assert replace(report, seconds=0.0) == KernelReport(15, 3, {"_rows_kernel": "spills"})
        assert task.wait() == report
    assert "15 variants of kernels, 3 of them compiled beside the start" in caplog.text


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("print('nothing')", "reported b'nothing"),
        ("import sys; sys.stdin.close(); print('{}', end='')", ""),
    ],
)
def test_a_child_that_fails_is_a_warning_and_said_once(
    spec: RankSpec, caplog: pytest.LogCaptureFixture, code: str, problem: str
) -> None:
    with KernelTask(spec, ManualClock(), child(code)) as task:
        assert replace(task.wait(), seconds=0.0) == KernelReport()
        task.wait()
    assert caplog.text.count("for their compiler") == bool(problem)
    assert problem in caplog.text


def test_a_child_that_hangs_is_ended(spec: RankSpec, caplog: pytest.LogCaptureFixture) -> None:
    hangs = child("import time; time.sleep(1000)")
    with KernelTask(spec, ManualClock(), hangs, most_s=0.05) as task:
        assert task.wait() == KernelReport()
    assert "took more than 0.05 s" in caplog.text


def test_the_child_ends_with_the_task(spec: RankSpec) -> None:
    with KernelTask(spec, ManualClock(), child("import time; time.sleep(1000)")) as task:
        process_id = task.process_id
        assert psutil.pid_exists(process_id)
    assert not psutil.pid_exists(process_id)


def test_ranks_that_have_a_task(spec: RankSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for with_task in (
        spec,
        replace(spec, tp=2, rank=1),
        replace(spec, pp=2),
        replace(spec, tp=2, ep=2),
        replace(spec, expert_offload=1),
        replace(spec, gguf_file="model.gguf"),
    ):
        assert has_task(with_task)
    for other in (
        replace(spec, device="cpu"),
        replace(spec, gguf_file="model.gguf", model_dir=f"{spec.model_dir}/not made here"),
    ):
        assert not has_task(other)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not has_task(spec)


def test_without_a_task_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="PassManager"), naming_kernels(None):
        raise RuntimeError("PassManager::run failed")
