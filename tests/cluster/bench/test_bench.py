"""The serving benchmark's load and figures, against hand-made records and a sender of known speed; the
options and the table of the engine benchmark."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import grpc
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.bench import bench_command
from cluster.bench.bench_command import cli, engine_table
from cluster.bench.bench_runs import histogram, offered_requests_per_s
from cluster.bench.load_options import LoadOptions, planned_runs, read_dataset
from cluster.bench.serving_figures import Objectives, by_class, figures_table, knee, summarize
from cluster.bench.serving_load import BenchPrompt, BenchRequest, Workload, run_workload
from cluster.errors import CallError
from cluster.model_source.source import ModelSource
from kvtransfer.common.clock import ManualClock
from workers.engine_bench import bench
from workers.engine_bench.bench import BenchOptions

LOAD = Workload(
    num_requests=8,
    concurrency=2,
    rate_per_s=0.0,
    input_tokens=32,
    output_tokens=4,
    shared_prefix_tokens=16,
    num_groups=2,
    seed=7,
    vocab_size=100,
)


def test_prompts_share_their_groups_prefix_and_nothing_else() -> None:
    prompts = LOAD.prompts()
    assert {len(prompt) for prompt in prompts} == {32}
    assert prompts[0][:16] == prompts[2][:16] != prompts[1][:16]
    assert prompts[0][16:] != prompts[2][16:]
    assert prompts == LOAD.prompts()
    assert prompts != replace(LOAD, seed=8).prompts()
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)


def test_poisson_arrivals_have_the_rate() -> None:
    arrivals = replace(LOAD, num_requests=4000, concurrency=0, rate_per_s=50.0).arrivals_s()
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.1)


def record(ttft_s: float, gaps_s: list[float], outcome: str = "ok", sent_at: float = 10.0) -> BenchRequest:
    times = tuple(float(time) for time in np.cumsum([sent_at + ttft_s, *gaps_s]))
    return BenchRequest(sent_at, times[-1], 100, times, outcome)


def test_figures_of_known_records() -> None:
    records = [record(0.1, [0.02, 0.04]), record(0.3, [0.06, 0.0])]
    figures = summarize(records, Objectives(ttft_ms=200, tpot_ms=100))
    assert figures.ttft_ms is not None
    assert figures.tpot_ms is not None
    assert figures.itl_ms is not None
    assert figures.ttft_ms["p50"] == pytest.approx(200)
    assert figures.tpot_ms["mean"] == pytest.approx(30)
    assert figures.itl_ms["mean"] == pytest.approx(30)
    assert figures.itl_ms["p99"] == pytest.approx(np.percentile([20, 40, 60, 0], 99))
    assert figures.seconds == pytest.approx(0.36)
    assert figures.output_tok_s == pytest.approx(6 / 0.36)
    assert figures.input_tok_s == pytest.approx(200 / 0.36)
    assert figures.good_share == 0.5


def test_what_did_not_finish_is_never_good() -> None:
    records = [
        record(0.01, [0.01]),
        record(0.01, [0.01], "timed out"),
        BenchRequest(10, 11, 1, (), "refused"),
    ]
    figures = summarize(records, Objectives(1000, 1000))
    assert (figures.num_ok, figures.num_timed_out, figures.num_refused) == (1, 1, 1)
    assert figures.good_share == pytest.approx(1 / 3)
    assert figures.goodput_per_s == pytest.approx(1.0)


def test_a_run_without_a_success_has_no_percentiles() -> None:
    figures = summarize([BenchRequest(0, 1, 1, (), "failed")], Objectives(1, 1))
    assert figures.ttft_ms is None
    assert figures.requests_per_s == 0


@pytest.mark.parametrize(
    ("values_ms", "places"),
    [([12.0] * 3 + [1900.0], ["12", "1900"]), ([10.0, 11.5, 12.0], ["10.0", "12.0"]), ([7.0], ["7.0"])],
)
def test_a_histogram_counts_requests_in_whole_numbers(values_ms: list[float], places: list[str]) -> None:
    *rows, ticks = histogram("TTFT", values_ms, 80).plain.rstrip().split("\n")
    counts = [row.partition("┤")[0].strip() for row in rows if "┤" in row]
    assert counts == [str(count) for count in reversed(range(max(map(values_ms.count, values_ms)) + 1))]
    assert [ticks.split()[0], ticks.split()[-1]] in ([places[0], places[-1]], places)


def test_the_rate_of_sessions_is_called_one_and_compared_in_requests() -> None:
    (run,) = planned_runs(
        LoadOptions(dataset="sessions", rate=2.0), read_dataset(LoadOptions(dataset="sessions"))
    )
    assert run.label == "2 sessions a second"
    (run,) = planned_runs(LoadOptions(rate=2.0), None)
    assert run.label == "2 a second"
    sent = {"offered_per_s": 2.0, "num_requests": 24, "num_sessions": 8}
    assert offered_requests_per_s(sent) == 6.0


def test_the_knee_is_the_last_rate_before_goodput_falls() -> None:
    assert knee([(4, 0.95), (1, 1.0), (8, 0.5), (16, 0.92)]) == 4
    assert knee([(1, 0.2)]) is None


async def test_concurrency_is_kept_and_outcomes_are_told() -> None:
    clock = ManualClock()
    running, most = 0, 0

    async def send(prompt: BenchPrompt, num_tokens: int, service_class: str) -> AsyncIterator[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await clock.sleep(0.5)
            if prompt == refused:
                raise CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            for _ in range(num_tokens):
                yield 1
                await clock.sleep(0.1)
        finally:
            running -= 1

    refused = LOAD.prompts()[3]
    done: list[BenchRequest] = []
    run = asyncio.create_task(run_workload(LOAD, send, clock, done.append))
    while not run.done():
        await asyncio.sleep(0)
        clock.advance(0.05)
    records = await run
    assert most == 2
    assert [item.outcome for item in records] == ["ok"] * 3 + ["refused"] + ["ok"] * 4
    assert len(done) == len(records)
    assert all(len(item.token_times) == 4 for item in records if item.outcome == "ok")
    assert records[0].ttft_s == pytest.approx(0.5, abs=0.11)


async def test_what_was_accepted_before_it_was_refused_has_expired() -> None:
    async def send(prompt: BenchPrompt, num_tokens: int, service_class: str) -> AsyncIterator[int]:
        if prompt != LOAD.prompts()[0]:
            yield 0
        raise CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "late")

    records = await run_workload(LOAD, send, ManualClock(), lambda _: None)
    assert [it.outcome for it in records] == ["refused"] + ["expired"] * 7
    assert summarize(records, Objectives(1000, 1000)).num_expired == 7


async def test_the_first_reason_of_a_failure_is_kept() -> None:
    async def refuse(prompt: BenchPrompt, num_tokens: int, service_class: str) -> AsyncIterator[int]:
        if prompt == LOAD.prompts()[-1]:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "away")
        if prompt != LOAD.prompts()[0]:
            raise CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield num_tokens

    records = await run_workload(LOAD, refuse, ManualClock(), lambda _: None)
    figures = summarize(records, Objectives(1000, 1000))
    assert (figures.num_ok, figures.num_refused, figures.num_failed) == (1, 6, 1)
    assert figures.first_reason == "RESOURCE_EXHAUSTED: full"
    assert figures.first_failure == "UNAVAILABLE: away"
    names = list(figures_table([("1 at once", figures)], "serving benchmark").columns[0].cells)
    assert "refused" in names
    assert "timed out" not in names


async def test_classes_take_turns_and_each_has_its_figures() -> None:
    async def send(prompt: BenchPrompt, num_tokens: int, service_class: str) -> AsyncIterator[int]:
        if service_class == "batch":
            raise CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield num_tokens

    load = replace(LOAD, service_classes=("interactive", "batch"))
    records = await run_workload(load, send, ManualClock(), lambda _: None)
    assert [it.service_class for it in records[:3]] == ["interactive", "batch", "interactive"]
    classes = by_class(records, Objectives(1000, 1000))
    assert {name: (it.num_ok, it.num_refused) for name, it in classes.items()} == {
        "interactive": (4, 0),
        "batch": (0, 4),
    }
    assert by_class(records[:1], Objectives(1000, 1000)) == {}


def test_a_class_that_does_not_exist_is_named() -> None:
    assert "not 'urgent'" in refusal("serve", "--service-class", "batch,urgent")


# ------------------------------------------------------------------------------------------ engine


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--peer", "ollama"], "--peer takes names of transformers, llama.cpp, vllm"),
        (["--peer", "vllm:q4"], "--peer vllm: takes a dtype of bf16, fp16, fp32 after the colon"),
        (["--peer", "vllm", "--peer-python", "vllm"], "--peer-python takes NAME=PATH"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_a_mistake_in_the_engine_s_options_is_named(options: list[str], reason: str) -> None:
    """Before anything is loaded: the model does not exist."""
    assert reason in refusal("engine", "--model", "/nonexistent", *options)


def test_weights_of_a_gguf_file_are_measured_of_such_alone() -> None:
    assert "--weights gguf: " in refusal("engine", "--weights", "int8,gguf")


def refusal(*arguments: str) -> str:
    """The message of a usage error, as one line."""
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    return " ".join(done.output.replace("\u2502", " ").split())


NO_COUNTS = ["0", "-1", "1.5", "1e3", "inf", "many", " ", "1,,4", "1,", ","]
NO_SHAPES = [*NO_COUNTS, "1x", "x5", "x", "4xlong", "0x5", "5x0", "4x-1", "4x1.5", "1x2x3", "4 x 5"]


@pytest.mark.parametrize("items", NO_SHAPES)
def test_a_decode_batch_that_cannot_be_read_is_refused_with_the_remedy(items: str) -> None:
    remedy = "Invalid value for --decode-batch: expected whole numbers N or NxCONTEXT above 0 between commas"
    assert remedy in refusal("engine", "--model", "/nonexistent", f"--decode-batch={items}")


@pytest.mark.parametrize("items", NO_COUNTS)
def test_a_prompt_length_that_cannot_be_read_is_refused(items: str) -> None:
    remedy = "Invalid value for --prefill: expected whole numbers N above 0 between commas"
    assert remedy in refusal("engine", "--model", "/nonexistent", f"--prefill={items}")


@pytest.mark.parametrize("items", ["0", "-1", "inf", "nan", "fast", "1,,4", "1,"])
def test_a_rate_that_cannot_be_read_is_refused(items: str) -> None:
    remedy = "Invalid value for --sweep: expected numbers above 0 between commas"
    assert remedy in refusal("serve", f"--sweep={items}")


def test_prompt_lengths_and_decode_batches_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[BenchOptions] = []
    monkeypatch.setattr(bench, "run_engine_bench", lambda options, emit: read.append(options))
    for lists in (["--prefill=64, 512", "--decode-batch=1,16x2048, 04"], ["--prefill=", "--decode-batch="]):
        done = CliRunner().invoke(cli, ["engine", "--context=96", *lists])
        assert done.exit_code == 0, done.output
    assert [(options.prefill, options.decode) for options in read] == [
        ([64, 512], [(1, 96), (16, 2048), (4, 96)]),
        ([], []),
    ]


def test_a_model_is_measured_by_whatever_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder, a GGUF file, and a name whose files are in the cache."""
    read: list[Path] = []
    monkeypatch.setattr(bench, "run_engine_bench", lambda options, emit: read.append(options.model_dir))
    write_random_checkpoint(tmp_path / "model", "llama", seed=0)
    file = gguf_files.write_gguf(tmp_path / "m.gguf", tmp_path / "model", GGMLQuantizationType.Q8_0)
    fetched = ModelSource(model=str(tmp_path / "model"))
    monkeypatch.setattr(
        bench_command, "fetched", lambda source: fetched if source.model == "org/name" else source
    )
    monkeypatch.chdir(tmp_path)
    for name in ("model", str(file), "org/name"):
        done = CliRunner().invoke(cli, ["engine", "--model", name, "--model-cache", str(tmp_path / "cache")])
        assert done.exit_code == 0, done.output
    assert read[::2] == [tmp_path / "model"] * 2
    assert read[1].parent == tmp_path / "cache"
    assert (read[1] / "model.safetensors").is_file()


def test_the_table_has_a_row_for_each_measure_and_a_column_for_each_peer() -> None:
    shape = {"tokens": 64, "batch": 4, "context": 128}
    lines: list[dict[str, Any]] = [
        {"what": "machine", "cpu": "any"},
        {"what": "prefill", "tokens": 512, "batch": 1, "context": 0, "tok_s": 400.0, "limit_tok_s": 500.0,
         "limit_ratio": 0.8, "products_tok_s": 450.0, "products_ratio": 0.89, "rounds": 5, "void": 0},
        {"what": "peer", "of": "prefill", "tokens": 512, "batch": 1, "context": 0, "peer": "vllm",
         "tok_s": 400.0, "peer_tok_s": 320.0, "ratio": 1.25},
        {"what": "decode", **shape, "tok_s": 90.0, "limit_tok_s": 120.0, "limit_ratio": 0.75, "rounds": 12,
         "void": 12},
        {"what": "peer", "of": "decode", **shape, "peer": "llama.cpp", "tok_s": 90.0, "peer_tok_s": 60.0,
         "ratio": 1.5},
    ]  # fmt: skip
    shown = io.StringIO()
    Console(width=120, file=shown).print(engine_table(lines))
    rows = [" ".join(row.split()) for row in shown.getvalue().splitlines()]
    assert "measure tandem vllm llama.cpp limit products void" in rows
    assert "prefill 512 400.0 320.0 (1.25) - 500.0 (0.80) 450.0 (0.89)" in rows
    assert "decode 4 at 128 90.0 - 60.0 (1.50) 120.0 (0.75) - 12 of 12" in rows
