"""Options of the command line that concern the store, in this process: nothing is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import ROOT, environment
from typer.testing import CliRunner

from cluster.cli.main import cli
from cluster.errors import BenchError

TRACE = [[1, 2, 3], [1, 2, 4], [1, 2, 3]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests that share their first two blocks."""
    file = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": number, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for number, ids in enumerate(TRACE)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_trace_is_replayed_at_every_size(trace: Path) -> None:
    sizes = ["--device-blocks", "0", "--dram-blocks", "2,100", "--nvme-blocks", "0"]
    done = CliRunner().invoke(cli, ["bench", "store", "--trace", str(trace), *sizes, "--json"])
    assert done.exit_code == 0, done.output
    small, large = (json.loads(line) for line in done.stdout.splitlines())
    assert (small["dram_blocks"], large["dram_blocks"]) == (2, 100)
    assert large["dram_hit_rate"] == large["ideal_hit_rate"] == pytest.approx(5 / 9)
    assert small["dram_hit_rate"] <= large["dram_hit_rate"]


def test_a_trace_that_is_none_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["bench", "store", "--trace", str(tmp_path / "none")])
    assert isinstance(done.exception, BenchError)
    assert str(tmp_path / "none") in str(done.exception)


@pytest.mark.parametrize("sizes", ["a", "1,", "-1"])
def test_sizes_are_whole_numbers(trace: Path, sizes: str) -> None:
    done = CliRunner().invoke(cli, ["bench", "store", "--trace", str(trace), f"--nvme-blocks={sizes}"])
    assert done.exit_code == 2
    assert "whole numbers from 0" in done.output


@pytest.mark.parametrize("arguments", [("--nvme", "folder"), ("--nvme-gb", "1")])
def test_nvme_needs_a_folder_and_a_size(arguments: tuple[str, str]) -> None:
    done = CliRunner().invoke(cli, ["serve", "--print-config", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "go together" in done.output


@pytest.mark.slow
def test_a_redis_url_of_the_environment_is_checked_before_anything_starts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "serve", "--ray-address", "local"],
        cwd=ROOT,
        env={**environment(), "REDIS_URL": "http://user:password@host"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "store.redis_url (or REDIS_URL of the environment): must begin with one of redis://" in done.stderr
    assert "password" not in done.stderr
    assert "starting Ray" not in done.stderr
