"""`tandem bench serve`: the command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from cluster.bench.bench_runs import run_overload_bench, run_serving_bench
from cluster.bench.grpc_target import grpc_target
from cluster.bench.http_target import http_target
from cluster.bench.load_options import (
    DEFAULT_CONCURRENCY,
    DRAWN_OPTIONS,
    LoadOptions,
    planned_runs,
    read_dataset,
    read_rate,
    refuse_others,
    workload_of,
)
from cluster.bench.overload_curve import MULTIPLES, OverloadPlan
from cluster.bench.serving_figures import Objectives
from cluster.cli.gateway_options import InferenceOptions, gateway_options, spliced_options
from cluster.cli.terminal import AsJson, err, out, run
from kvtransfer.common.clock import SystemClock

_MULTIPLES = ",".join(f"{multiple:g}" for multiple in MULTIPLES)


# With `--overload`, which offers rates of its own.
_OVERLOAD_OPTIONS = DRAWN_OPTIONS - {"rate", "sweep"} | {"requests"}


def bench_serve(
    as_json: AsJson = False,
    http: Annotated[
        str, typer.Option(help="Call this server over OpenAI's API instead of gRPC: host:port or a URL.")
    ] = "",
    slo_ttft_ms: Annotated[float, typer.Option(min=0)] = 1000.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=0)] = 100.0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds; a later answer is lost.")] = 60.0,
    overload: Annotated[
        bool, typer.Option(help="Offer --multiples of the capacity, which is measured first.")
    ] = False,
    multiples: Annotated[str, typer.Option(help="With --overload: of the capacity.")] = _MULTIPLES,
    capacity: Annotated[
        float, typer.Option(min=0, help="With --overload: requests a second; 0: measured.")
    ] = 0.0,
    duration: Annotated[float, typer.Option(min=1, help="With --overload: of each load, seconds.")] = 180.0,
    *,
    load: LoadOptions,
    to: InferenceOptions,
) -> None:
    """Load a running cluster; latencies, throughput and goodput, by turn where there are sessions."""
    objectives = Objectives(slo_ttft_ms, slo_tpot_ms)
    console = err if as_json else out
    clock, who = SystemClock(), to.credentials()
    if http and who.certificate is not None:
        raise typer.BadParameter("is for gRPC alone", param_hint="--client-certificate")
    vocab_size = load.vocab_size or 0
    opened = http_target(http, timeout, who, vocab_size) if http else grpc_target(to.address, timeout, who)

    async def measure(bench: Callable[..., Awaitable[None]], what: object) -> None:
        async with opened as target:
            await bench(target, what, objectives, clock, console, as_json=as_json)

    if overload:
        refuse_others(load, _OVERLOAD_OPTIONS, "--overload")
        plan = OverloadPlan(
            workload_of(load, 0.0),
            capacity,
            load.concurrency or DEFAULT_CONCURRENCY,
            duration,
            tuple(read_rate(item, "--multiples") for item in multiples.split(",")),
        )
        run(measure(run_overload_bench, plan))
    else:
        run(measure(run_serving_bench, planned_runs(load, read_dataset(load))))


bench_serve_command = gateway_options(spliced_options(bench_serve, LoadOptions))
