"""`tandem simulate` on small loads."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli.main import cli
from cluster.scaling import scaler

SYNTHETIC = ["simulate", "--format", "synthetic", "--requests", "30", "--rate", "10", "--output", "20"]
TRACE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 500, "input_length": 1300, "output_length": 5, "hash_ids": [1, 2, 4]},
    {"timestamp": 1500, "input_length": 600, "output_length": 0, "hash_ids": [1, 9]},
]


def run(*options: str) -> list[dict[str, Any]]:
    """Return the figures of a run, one object for each policy."""
    result = CliRunner().invoke(cli, [*options, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def refused(*options: str) -> str:
    result = CliRunner().invoke(cli, [*options, "--json"])
    assert result.exit_code != 0
    return " ".join(result.output.split())


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, TRACE)))
    return str(file)


def test_figures_of_a_drawn_load(tmp_path: Path) -> None:
    file = tmp_path / "requests.csv"
    model = ["--model", "llama-3.1-8b", "--hardware", "H100", "--price-per-hour", "2.5"]
    (found,) = run(*SYNTHETIC, *model, "--csv", str(file))
    assert found["requests"] == found["finished"] == 30
    assert 0 < found["ttft_p50_s"] <= found["ttft_p99_s"]
    assert 0.004 < found["tpot_p50_s"] < 0.02
    assert found["cost_per_million_tokens"] > 0
    assert {"goodput_rps", "refused", "hit_rate", "imbalance", "utilization"} <= set(found)
    with file.open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 30
    assert all(float(row["ended_at"]) > float(row["first_token_at"]) > 0 for row in rows)


def test_an_objective_of_the_engines_lets_decode_replicas_compute_prompts() -> None:
    """Of prompts for which one prefill replica is too slow."""
    load = ["simulate", "--format", "synthetic", "--requests", "200", "--rate", "20", "--input", "6000"]
    cluster = ["--output", "300", "--prefill", "1", "--decode", "4", "--model", "llama-3.1-8b"]
    options = [*load, *cluster, "--hardware", "H100", "--no-admission"]
    (without,), (found,) = run(*options), run(*options, "--tpot-objective-ms", "30")
    assert found["ttft_mean_s"] < 0.5 * without["ttft_mean_s"]
    assert found["tpot_p99_s"] < 0.035
    error = refused(*options, "--tpot-objective-ms", "0")
    assert "--tpot-objective-ms" in error
    assert "0.001" in error


def test_moves_of_the_scaler_are_figures_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger(scaler.__name__)
    level = log.level
    load = ["simulate", "--format", "synthetic", "--requests", "40", "--rate", "0.5", "--input", "500"]
    (found,) = run(*load, "--output", "5", "--prefill", "2", "--autoscale", "prefill=1:4,decode=1:4")
    assert found["scaling_changes"] > 0
    assert not [record for record in caplog.records if record.name == log.name]
    assert log.level == level


def test_each_change_is_shown_with_its_reason() -> None:
    load = ["simulate", "--format", "synthetic", "--requests", "40", "--rate", "0.5", "--input", "500"]
    options = [*load, "--output", "5", "--prefill", "2", "--autoscale", "prefill=1:4,decode=1:4", "--moves"]
    (found,) = run(*options)
    assert len(found["moves"]) == found["scaling_changes"] > 0
    first = found["moves"][0]
    shown = CliRunner().invoke(cli, options).stdout.splitlines()
    (line,) = (line for line in shown if line.endswith(first["reason"]))
    assert line.split()[:6] == [
        f"{first['at']:.0f}",
        "s",
        first["pool"],
        str(first["before"]),
        "->",
        str(first["after"]),
    ]


def test_blocks_of_a_trace_are_found_again(trace: str) -> None:
    (found,) = run("simulate", "--trace", trace, "--colocated", "--decode", "0", "--utilization", "0.1")
    # Blocks 1 and 2 of the second prompt, and of the third, whose second block is another one, the first.
    assert found["hit_rate"] == pytest.approx((1024 + 512) / 3000, abs=1e-6)


def test_a_column_for_each_policy(trace: str) -> None:
    found = run("simulate", "--trace", trace, "--colocated", "--policy", "round_robin,random")
    assert [each["policy"] for each in found] == ["round_robin", "random"]


def test_the_table_is_that_of_measurements(trace: str) -> None:
    result = CliRunner().invoke(cli, ["simulate", "--trace", trace, "--colocated"])
    assert result.exit_code == 0, result.output
    for name in ("serving, simulated", "TTFT p50, ms", "goodput, requests/s", "hit rate"):
        assert name in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["simulate"], "--trace"),
        ([*SYNTHETIC, "--policy", "best"], "best is none of"),
        ([*SYNTHETIC, "--hardware", "H100"], "--model: name the model"),
        ([*SYNTHETIC, "--model", "llama-3.1-8b"], "--hardware: name the device"),
        ([*SYNTHETIC, "--model", "llama-3.3-70b", "--hardware", "L40S"], "does not fit 1 L40S"),
        ([*SYNTHETIC, "--failures", "r0000"], "--failures r0000: expected REPLICA@SECOND"),
        ([*SYNTHETIC, "--failures", "r9@1"], "--failures: there is no replica r9"),
        ([*SYNTHETIC, "--decode", "0"], "--decode: no replica decodes"),
        (["simulate", "--trace", "none.jsonl"], "none.jsonl"),
        ([*SYNTHETIC, "--moves"], "--moves: is for --autoscale"),
        ([*SYNTHETIC, "--change-roles"], "--change-roles: is for --autoscale"),
        ([*SYNTHETIC, "--start-s", "5"], "--start-s: is for --autoscale"),
        ([*SYNTHETIC, "--autoscale", "prefill=a:b"], "--autoscale prefill=a:b: expected ROLE=MIN:MAX"),
        ([*SYNTHETIC, "--autoscale", "both=1:2"], "--autoscale both: no replica of this role"),
        ([*SYNTHETIC, "--autoscale", "decode=1:2,decode=1:3"], "names a pool more than once"),
        ([*SYNTHETIC, "--kv-blocks", "2", "--input", "100000"], "raise --kv-blocks"),
        *(
            ([*SYNTHETIC, option, value], f"Invalid value for '{option}'")
            for option in (
                "--rate",
                "--time-scale",
                "--utilization",
                "--price-per-hour",
                "--slo-ttft-ms",
                "--slo-tpot-ms",
                "--think-s",
                "--start-s",
            )
            for value in ("inf", "nan", "-1", "1e300")
        ),
        *(
            ([*SYNTHETIC, option, "1000000000000"], f"Invalid value for '{option}'")
            for option in (
                "--input",
                "--output",
                "--prefill",
                "--decode",
                "--kv-blocks",
                "--block-tokens",
                "--gateways",
            )
        ),
    ],
)
def test_wrong_options_are_named(options: list[str], said: str) -> None:
    assert said in refused(*options)
