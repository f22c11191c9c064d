"""Kernels that are compiled beside a rank's start lie in Triton's cache for the next process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hopper_compiler import compile_by_script
from rank_specs import cuda_spec

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import ManualClock, SystemClock
from workers.errors import WorkerError
from workers.rank.kernel_task import KernelTask, naming_kernels
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity

# The kernels that are tried on a card in other sizes, too, before they are used there.
TRIED = {"_attend_split", "_attend_whole", "_attend_tiles", "_combine_pieces"}
SCRIPT = Path(__file__).resolve().parent / "compile_rank_kernels.py"


def test_a_second_process_compiles_nothing_and_errors_name_their_kernel(
    tmp_path: Path, device: torch.device
) -> None:
    write_random_checkpoint(tmp_path / "model", "llama", seed=1)

    def run() -> dict[str, Any]:
        (line,) = compile_by_script(SCRIPT, tmp_path / "cache", str(tmp_path / "model"), "2")
        assert line["num_found"] > 8
        report: dict[str, Any] = line["report"]
        return report

    first, second = run(), run()
    assert first["kernel_to_error"] == second["kernel_to_error"] == {"_broken_kernel": "no such tile"}
    assert [it["num_variants"] for it in (first, second)] == [3, 3]
    assert [it["num_compiled"] for it in (first, second)] == [3, 1], "that which fails is not kept"


@pytest.mark.gpu
def test_the_rank_compiles_nothing_by_itself(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    write_random_checkpoint(tmp_path / "model", "llama", seed=1)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    spec = cuda_spec(tmp_path / "model", dtype="bf16", max_batch_tokens=512, num_kv_tokens=4096)
    missed: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            missed.append(src.name)

    with KernelTask(spec, SystemClock()) as task:
        report = task.wait()
    assert report.num_compiled > 8
    monkeypatch.setattr(knobs.compilation, "listener", note)
    runner = ModelRunner(
        CheckpointFolder(tmp_path / "model"),
        ComputeSettings.of(spec, device),
        RankCapacity.of(spec),
        SystemClock(),
    )
    runner.warm_up(spec.max_batch_tokens)
    runner.close()
    assert set(missed) <= TRIED


def failed_task(tmp_path: Path) -> KernelTask:
    code = """print('{"kernel_to_error": {"_rows_kernel": "no such tile"}}')"""
    return KernelTask(cuda_spec(tmp_path), ManualClock(), ("python3", "-c", code))


@pytest.mark.parametrize("is_of_passes", [False, True])
def test_the_error_that_ends_a_start_names_the_kernel(
    tmp_path: Path, device: torch.device, is_of_passes: bool
) -> None:
    from triton.errors import TritonError

    error = RuntimeError("PassManager::run failed") if is_of_passes else TritonError("at 3:4")
    with (
        failed_task(tmp_path) as task,
        pytest.raises(WorkerError, match="_rows_kernel: no such tile"),
        naming_kernels(task),
    ):
        raise error


def test_other_errors_stay_and_kernels_that_were_compiled_later_are_a_warning(
    tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        failed_task(tmp_path) as task,
        pytest.raises(RuntimeError, match="out of memory"),
        naming_kernels(task),
    ):
        raise RuntimeError("out of memory")
    assert "_rows_kernel" not in caplog.text
    with failed_task(tmp_path) as task, naming_kernels(task):
        pass
    assert caplog.text.count("_rows_kernel") == 1
