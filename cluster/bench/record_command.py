"""`tandem bench record`: write what a running cluster has recorded of its requests as a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.api.admin_client import AdminClient
from cluster.bench.recorded_trace import RecordedTrace, recorded_trace
from cluster.bench.serving_figures import Objectives, ServingFigures, figures_table, summarize
from cluster.bench.trace_file import write_trace
from cluster.cli.durations import read_duration_s
from cluster.cli.gateway_options import AdminOptions, gateway_options
from cluster.cli.terminal import AsJson, err, out, run
from cluster.errors import BenchError


def bench_record(
    out_file: Annotated[Path, typer.Option("--out", help="The trace to write, JSON lines.")],
    last: Annotated[str, typer.Option(help="Requests that arrived in this time, such as 10m.")] = "10m",
    slo_ttft_ms: Annotated[
        float, typer.Option(min=0.1, max=1e7, help="First token of a good request.")
    ] = 1000.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=0.1, max=1e7, help="Each further token of one.")] = 100.0,
    as_json: AsJson = False,
    *,
    to: AdminOptions,
) -> None:
    """Write the latest requests of a running cluster as a trace in Mooncake's format, without their text;
    show how they were served."""
    last_s = read_duration_s(last, "--last")
    run(_record(to, last_s, out_file, Objectives(slo_ttft_ms, slo_tpot_ms), err if as_json else out, as_json))


async def _record(
    to: AdminOptions, last_s: float, path: Path, objectives: Objectives, console: Console, as_json: bool
) -> None:
    async with AdminClient(to.admin_address, credentials=to.credentials()) as client:
        trace = await recorded_trace(client, last_s)
    if not trace.requests:
        raise BenchError(_nothing(trace))
    write_trace(path, trace.requests)
    figures = summarize(trace.served, objectives)
    if as_json:
        print(json.dumps(record_json(path, trace, figures)), flush=True)
        return
    console.print(figures_table([("recorded", figures)], f"{len(trace.requests)} requests in {path}"))
    if trace.num_assumed:
        console.print(f"{trace.num_assumed} did not finish: the trace has lengths of others for them")
    for gateway_id, problem in sorted(trace.problems.items()):
        console.print(f"of gateway {gateway_id} requests lack: {problem}", markup=False, soft_wrap=True)


def record_json(path: Path, trace: RecordedTrace, figures: ServingFigures) -> dict[str, Any]:
    """Return the recording and its figures as JSON values."""
    return {
        "what": "record",
        "file": str(path),
        "block_tokens": trace.block_tokens,
        "began_at": trace.began_at,
        "complete_since": trace.complete_since,
        "num_assumed": trace.num_assumed,
        "problems": trace.problems,
        **figures.as_json(),
    }


def _nothing(trace: RecordedTrace) -> str:
    problems = "".join(f"; gateway {name}: {why}" for name, why in sorted(trace.problems.items()))
    return f"no request was recorded in that time{problems}"


bench_record_command = gateway_options(bench_record)
