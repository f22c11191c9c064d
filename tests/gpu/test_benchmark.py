"""The benchmark of the device itself: its lines, and that a part that fails stops no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device_time import union_us
from benchmarks.gpu import PARTS
from benchmarks.gpu_quantized import EXPERT_BATCHES

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def lines(*arguments: str) -> list[dict[str, Any]]:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line["benchmark"] == "gpu" for line in found)
    return found


def test_the_parts_are_listed() -> None:
    listed = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(PARTS)
    assert all(len(line.split()) > 3 for line in listed)
    refused = run("decode", "no-such-part")
    assert refused.returncode == 2
    assert "unknown parts no-such-part" in refused.stderr


def test_every_figure_has_its_limit_and_an_error_is_a_line(device: torch.device) -> None:
    tiny = ("--device", str(device), "--model", "tiny", "--batches", "2", "--context", "64")
    found = lines("decode", "idle", "cuda_ipc", "hand_over", "experts", "long_context", "hybrid", *tiny)
    pushes = ["cuda_ipc"] * (2 if torch.cuda.device_count() > 1 else 1)
    models = [*["experts"] * 2, *["long_context"] * 3, *["hybrid"] * 2]
    parts = ["decode", "idle", *pushes, "hand_over", *models]
    kernels, found = found[3 + len(parts) :], found[: 3 + len(parts)]
    assert [line["part"] for line in found] == ["limits"] * 3 + parts
    for line in found[1:3]:
        assert line["value"] > 0
    decode, idle, push, *others = found[3:]
    across, (landing, *of_models) = others[: len(pushes) - 1], others[len(pushes) - 1 :]
    for line in (decode, landing, *of_models):
        assert line["ratio"] == pytest.approx(line["limit"] / line["value"], rel=0.01)
    assert [line["figure"] for line in of_models] == [
        *(f"decode_ms at batch {batch}, context 64" for batch in EXPERT_BATCHES),
        *(f"decode_ms at batch {batch}, context 1000" for batch in (1, 8)),
        "step_ms of 64 tokens behind 1000",
        "decode_ms at batch 2, context 64",
        "prefill_ms of 96 tokens",
    ]
    assert any(line["figure"] == "states_us of a step at batch 2" for line in kernels) == (
        device.type == "cuda"
    )
    for line in (push, *across):
        assert line["ratio"] == pytest.approx(line["value"] / line["limit"], rel=0.01)
    assert [line["figure"] for line in across] == ["cuda_ipc_gb_s across cards"] * (len(pushes) - 1)
    if device.type == "cpu":
        assert "needs a CUDA device" in idle["error"]
    else:
        assert idle["value"] < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_is_one_line_that_says_so() -> None:
    assert lines("decode") == [
        {"benchmark": "gpu", "part": "limits", "error": "torch finds no CUDA device"},
    ]


def test_times_that_overlap_are_counted_once() -> None:
    assert union_us([(3, 5), (0, 2), (1, 2.5), (4, 4.5), (7, 8)]) == 5.5
    assert union_us([]) == 0
