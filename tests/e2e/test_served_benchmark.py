"""The benchmark of whole clusters on a card, tried on a CPU: it starts them, asks, and prints its lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_both_clusters_answer_every_request_and_each_line_has_its_limit() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "served", "--device", "cpu", "--model", "tiny"]
    done = subprocess.run(
        [*command, "--batches", "2", "--context", "64"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    served = [line for line in lines if line["part"] == "served"]
    assert not any("error" in line for line in served), served
    assert [line["figure"] for line in served] == [
        "start_s of a cluster with compiled kernels",
        "output_tok_s of one replica, 1 at once, 64 + 4 tokens",
        "ttft_ms of 64 tokens, alone",
        "output_tok_s of one replica, 10 at once, 20 + 8 tokens on average",
        "output_tok_s of two halves, 1 at once, 64 + 4 tokens",
        "output_tok_s of two halves, 10 at once, 20 + 8 tokens on average",
        "landing_ms of 96 tokens in service",
        "output_tok_s of one replica beside two halves, 10 at once, 20 + 8 tokens on average",
        "output_tok_s of one replica behind two gateways, 10 at once, 20 + 8 tokens on average",
        "start_s of a cluster that gets a second replica",
    ]
    for line in served:
        assert line["value"] > 0
        if "requests" in line:
            assert line["failed"] == 0
            assert 0 < line["ttft_ms"][0] <= line["ttft_ms"][2]
    start, _, alone, at_once, *halves, landing, beside, gateways, second = served
    for line in (start, alone, landing, second):
        assert line["ratio"] == pytest.approx(line["limit"] / line["value"], rel=0.01)
    for line in (at_once, beside):
        assert line["ratio"] == pytest.approx(line["value"] / line["limit"], rel=0.01)
    assert (beside["value"], beside["limit"]) == (at_once["value"], halves[-1]["value"])
    assert not any("limit" in line for line in (*halves, gateways)), "the target is that of one gateway, too"
