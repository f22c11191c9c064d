"""`tandem bench serve` and `tandem bench engine`: the commands, and what they show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import plotext
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cluster.api.channel import ClientCredentials
from cluster.api.client import Client, GenerateOptions
from cluster.cli.bench_overload import MULTIPLES, OverloadPlan, overload_table, run_overload, verdict
from cluster.cli.gateway_options import InferenceOptions, gateway_options
from cluster.cli.serving_load import (
    PERCENTILES,
    BenchRequest,
    Objectives,
    Workload,
    by_class,
    knee,
    run_workload,
    summarize,
)
from cluster.cli.terminal import (
    NONE,
    AsJson,
    bundled_model,
    err,
    made_table,
    out,
    run,
)
from cluster.dtypes import auto_dtype
from cluster.errors import BenchError
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.common.clock import Clock, SystemClock
from workers.engine_bench.peer_process import parse_peers
from workers.errors import PeerError
from workers.messages.link import SERVICE_CLASSES

cli = typer.Typer(no_args_is_help=True, help="Measure a running cluster, the engine or the store alone.")

_NUM_BINS = 30
_MULTIPLES = ",".join(f"{multiple:g}" for multiple in MULTIPLES)


async def run_serving_bench(
    address: str,
    workloads: Sequence[Workload],
    objectives: Objectives,
    timeout_s: float,
    clock: Clock,
    console: Console,
    *,
    as_json: bool,
    who: ClientCredentials | None = None,
) -> None:
    """Run the workloads one after the other; print a table and a plot (with several rates also the knee), or
    JSON lines.

    A workload's `vocab_size` 0 becomes the served model's.
    """
    runs: list[tuple[str, dict[str, Any]]] = []
    records: list[BenchRequest] = []
    async with Client(address, credentials=who) as client:
        model = (await client.models())[0]
        for workload in workloads:
            drawn = replace(workload, vocab_size=workload.vocab_size or model.vocab_size)
            label = f"{drawn.rate_per_s:g} req/s" if drawn.rate_per_s > 0 else f"{drawn.concurrency} at once"
            records = await _run_one(client, drawn, timeout_s, clock, console, label)
            stats = {
                "what": "serve",
                "model": model.name,
                "offered_per_s": drawn.rate_per_s or None,
                "concurrency": drawn.concurrency or None,
                "input_tokens": drawn.input_tokens,
                "output_tokens": drawn.output_tokens,
                "shared_prefix_tokens": drawn.shared_prefix_tokens,
                "prefix_groups": drawn.num_groups,
                **summarize(records, objectives),
            }
            runs.append((label, stats))
            if classes := by_class(records, objectives):
                stats["classes"] = classes
            if as_json:
                print(json.dumps(stats), flush=True)
    reasons = [stats["first_reason"] for _, stats in runs if stats["first_reason"]]
    if reasons and not any(stats["num_ok"] for _, stats in runs):
        raise BenchError(f"no request finished; the first: {reasons[0]}")
    rates = [(stats["offered_per_s"], stats["good_share"]) for _, stats in runs]
    is_sweep = len(runs) > 1
    if is_sweep and as_json:
        print(json.dumps({"what": "knee", "offered_per_s": knee(rates)}))
    if as_json:
        return
    columns = [
        column for label, stats in runs for column in ((label, stats), *stats.get("classes", {}).items())
    ]
    console.print(bench_table(columns))
    if reasons:
        console.print(f"not every request finished; the first: {reasons[0]}", markup=False, soft_wrap=True)
    if is_sweep:
        points = [(stats["offered_per_s"], stats["goodput_per_s"]) for _, stats in runs]
        console.print(sweep_plot(points, min(console.width, 100)))
        best = knee(rates)
        console.print(f"knee: {'below the lowest rate' if best is None else f'{best:g} req/s'}")
    elif ttfts := [record.ttft_s * 1e3 for record in records if record.outcome == "ok"]:
        console.print(histogram("TTFT", ttfts, min(console.width, 100)))


async def run_overload_bench(
    address: str,
    plan: OverloadPlan,
    objectives: Objectives,
    timeout_s: float,
    clock: Clock,
    console: Console,
    *,
    as_json: bool,
    who: ClientCredentials | None = None,
) -> None:
    """Offer what the plan says; print JSON lines, or a table and the verdict."""
    async with Client(address, credentials=who) as client:
        model = (await client.models())[0]
        drawn = replace(plan.workload, vocab_size=plan.workload.vocab_size or model.vocab_size)

        async def run_one(label: str, workload: Workload) -> list[BenchRequest]:
            return await _run_one(client, workload, timeout_s, clock, console, label)

        records = await run_overload(plan._replace(workload=drawn), objectives, run_one)
    if as_json:
        for record in records:
            print(json.dumps({**record, "model": model.name}), flush=True)
        return
    console.print(overload_table(records))
    console.print(verdict(records), markup=False, soft_wrap=True)


async def _run_one(
    client: Client, workload: Workload, timeout_s: float, clock: Clock, console: Console, label: str
) -> list[BenchRequest]:
    async def send(prompt: list[int], num_tokens: int, service_class: str) -> AsyncIterator[int]:
        options = GenerateOptions(
            max_tokens=num_tokens, ignore_eos=True, seed=workload.seed, service_class=service_class
        )
        events = aiter(client.generate(prompt, options, timeout_s=timeout_s, resume=False))
        async for event in events:
            if isinstance(event, pb.Delta) and event.token_ids:
                yield len(event.token_ids)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=workload.num_requests)
        return await run_workload(workload, send, clock, lambda _: progress.advance(task))


def bench_table(runs: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Return one column for each run of `summarize`, headed by its load."""
    table = made_table("serving benchmark", "", numbers=[label for label, _ in runs])
    stats = [figure for _, figure in runs]
    table.add_row("finished", *(f"{run['num_ok']} of {run['num_requests']}" for run in stats))
    for name, key in (("refused", "num_refused"), ("timed out", "num_timed_out"), ("failed", "num_failed")):
        if any(run[key] for run in stats):
            table.add_row(name, *(str(run[key]) for run in stats))
    for name, key in (
        ("requests/s", "requests_per_s"),
        ("input tokens/s", "input_tok_s"),
        ("output tokens/s", "output_tok_s"),
    ):
        table.add_row(name, *(f"{run[key]:.1f}" for run in stats))
    for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("end to end", "e2e_ms")):
        for rank in PERCENTILES:
            cells = (f"{run[key][f'p{rank}']:.1f}" if run[key] else NONE for run in stats)
            table.add_row(f"{name} p{rank}, ms", *cells)
    table.add_row("goodput, requests/s", *(f"{run['goodput_per_s']:.1f}" for run in stats))
    table.add_row("good", *(f"{run['good_share']:.0%}" for run in stats))
    return table


def histogram(name: str, values_ms: Sequence[float], width: int) -> Text:
    """Plot the distribution of a latency as text."""
    figure = _empty_figure(f"{name}, ms", width, 12)
    figure.draw(figure.hist(list(values_ms), bins=_NUM_BINS))
    return Text(plotext.uncolorize(str(figure.build())))


def sweep_plot(points: Sequence[tuple[float, float]], width: int) -> Text:
    """Plot goodput against offered load, both in requests a second, beside the line where they are equal."""
    rates = [rate for rate, _ in points]
    figure = _empty_figure("goodput against offered load, requests/s", width, 16)
    for label, values, marker in (("offered", rates, "."), ("good", [good for _, good in points], "o")):
        figure.draw(figure.signal(rates, values, marker=marker).lines().label(label))
    return Text(plotext.uncolorize(str(figure.build())))


def _empty_figure(title: str, width: int, height: int) -> Any:
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.title(title)
    return figure


@cli.command("serve")
@gateway_options
def bench_serve(
    as_json: AsJson = False,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each run.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight, without a rate.")] = 8,
    rate: Annotated[float, typer.Option(min=0, help="Poisson arrivals a second, without a limit.")] = 0.0,
    sweep: Annotated[str, typer.Option(help="Rates to run one after the other: 1,2,4,8.")] = "",
    input_tokens: Annotated[int, typer.Option(min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(min=1)] = 32,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens that a group of prompts shares.")] = 0,
    prefix_groups: Annotated[int, typer.Option(min=1)] = 1,
    slo_ttft_ms: Annotated[float, typer.Option(min=0)] = 1000.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=0)] = 100.0,
    seed: Annotated[int, typer.Option()] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds; a later answer is lost.")] = 60.0,
    overload: Annotated[
        bool, typer.Option(help="Offer --multiples of the capacity, which is measured first.")
    ] = False,
    multiples: Annotated[str, typer.Option(help="With --overload: of the capacity.")] = _MULTIPLES,
    capacity: Annotated[
        float, typer.Option(min=0, help="With --overload: requests a second; 0: measured.")
    ] = 0.0,
    duration: Annotated[float, typer.Option(min=1, help="With --overload: of each load, seconds.")] = 180.0,
    service_class: Annotated[
        str, typer.Option(help="Of the requests; of several, interactive,batch, they take turns.")
    ] = "",
    *,
    to: InferenceOptions,
) -> None:
    """Load a running cluster; latencies, throughput and goodput."""
    objectives = Objectives(slo_ttft_ms, slo_tpot_ms)
    console = err if as_json else out
    address, who = to.address, to.credentials()
    clock = SystemClock()
    classes = _classes(service_class)
    if overload:
        load = Workload(
            num_requests=requests,
            concurrency=concurrency,
            rate_per_s=0.0,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            shared_prefix_tokens=shared_prefix,
            num_groups=prefix_groups,
            seed=seed,
            vocab_size=0,
            service_classes=classes,
        )
        plan = OverloadPlan(
            load, capacity, concurrency, duration, tuple(_rate(item) for item in multiples.split(","))
        )
        run(run_overload_bench(address, plan, objectives, timeout, clock, console, as_json=as_json, who=who))
        return
    rates = [_rate(item) for item in sweep.split(",")] if sweep else [rate]
    workloads = [
        Workload(
            num_requests=requests,
            concurrency=0 if value > 0 else concurrency,
            rate_per_s=value,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            shared_prefix_tokens=shared_prefix,
            num_groups=prefix_groups,
            seed=seed + index,
            vocab_size=0,
            service_classes=classes,
        )
        for index, value in enumerate(rates)
    ]
    run(run_serving_bench(address, workloads, objectives, timeout, clock, console, as_json=as_json, who=who))


@cli.command("engine")
def bench_engine(
    model: Annotated[Path | None, typer.Option(help="Model folder; default: the bundled one.")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (as the cluster resolves it), bf16, fp16 or fp32.")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=1)] = 2,
    prefill: Annotated[str, typer.Option(help="Prompt lengths; empty: none.")] = "512,2048",
    decode_batch: Annotated[
        str,
        typer.Option(
            help="Sequences of a step, and their context if it is another: 1,4,16,16x2048; empty: none."
        ),
    ] = "1,4,8,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the decode figures.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which others left the CPU alone.")] = 5,
    block_tokens: Annotated[int, typer.Option()] = 64,
    device: Annotated[str, typer.Option()] = "cpu",
    peer: Annotated[
        str,
        typer.Option(help="Measured beside, in turn: transformers,llama.cpp,vllm; NAME:fp32 for a dtype."),
    ] = "",
    peer_python: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH: the interpreter that has the peer; default: this.")
    ] = None,
    peer_cache: Annotated[
        Path | None, typer.Option(help="Folder for the peers' converted and compiled files.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prefill and decode rates of the engine alone, without Ray, beside the machine's limits and other
    engines."""
    from workers.engine_bench.bench import BenchOptions, run_engine_bench  # here: it imports torch

    try:
        peers = parse_peers(peer, peer_python or [])
    except PeerError as error:
        raise typer.BadParameter(str(error)) from None
    prompts = [_prompt_tokens(item) for item in prefill.split(",")] if prefill else []
    shapes = [_decode_shape(item, context) for item in decode_batch.split(",")] if decode_batch else []
    model_dir = model or bundled_model()
    options = BenchOptions(
        model_dir=model_dir,
        dtype=auto_dtype(model_dir, on_cpu=device == "cpu") if dtype == "auto" else dtype,
        threads=threads,
        prefill=prompts,
        decode=shapes,
        num_rounds=rounds,
        peers=peers,
        peer_cache=peer_cache,
        block_tokens=block_tokens,
        device=device,
    )
    lines: list[dict[str, Any]] = []

    def show(stats: dict[str, Any]) -> None:
        lines.append(stats)
        if as_json:
            print(json.dumps(stats), flush=True)
        elif stats["what"] not in ENGINE_RESULTS:
            rest = "  ".join(f"{name} {_shown(value)}" for name, value in stats.items() if name != "what")
            print(f"{stats['what']}: {rest}", flush=True)

    run_engine_bench(options, show)
    if not as_json:
        # With all peers the table is wider than 80 columns, and nothing of it can be folded.
        Console(width=max(out.width, _ENGINE_TABLE_WIDTH)).print(engine_table(lines))


_ENGINE_TABLE_WIDTH = 120
# The lines of the engine benchmark that its table holds.
ENGINE_RESULTS = ("prefill", "decode", "peer")


def engine_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row for each measure: tokens a second of ours, then of each peer and limit with the median
    of the rounds' ratios of ours to it."""
    peers = list(dict.fromkeys(line["peer"] for line in lines if line["what"] == "peer"))
    title = "engine benchmark, tok/s (ratio of tandem's, median of rounds)"
    table = made_table(title, "measure", numbers=["tandem", *peers, "limit", "products", "void"])
    for line in lines:
        if line["what"] not in ("prefill", "decode"):
            continue
        is_prefill = line["what"] == "prefill"
        name = f"prefill {line['tokens']}" if is_prefill else f"decode {line['batch']} at {line['context']}"
        cells = [_shown(line["tok_s"])]
        for peer in peers:
            found = next((each for each in lines if _is_of(each, line) and each["peer"] == peer), {})
            cells.append(_with_ratio(found.get("peer_tok_s"), found.get("ratio")))
        for limit in ("limit", "products"):
            cells.append(_with_ratio(line.get(f"{limit}_tok_s"), line.get(f"{limit}_ratio")))
        table.add_row(name, *cells, f"{line['void']} of {line['rounds']}" if line["void"] else "")
    return table


def _with_ratio(tok_s: float | None, ratio: float | None) -> str:
    return NONE if tok_s is None or ratio is None else f"{tok_s:.1f} ({ratio:.2f})"


def _is_of(peer: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    keys = ("tokens", "batch", "context")
    is_peer = peer["what"] == "peer" and peer["of"] == line["what"]
    return is_peer and all(peer[key] == line[key] for key in keys)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.3g}" if value < 10 else f"{value:.1f}"
    return NONE if value is None else str(value)


_COUNT = "0*[1-9][0-9]*"
_PROMPT_TOKENS = re.compile(_COUNT)
_DECODE_SHAPE = re.compile(f"({_COUNT})(?:x({_COUNT}))?")


def _prompt_tokens(item: str) -> int:
    if not _PROMPT_TOKENS.fullmatch(item.strip()):
        raise _not_understood("--prefill", "whole numbers N", item)
    return int(item)


def _decode_shape(item: str, context: int) -> tuple[int, int]:
    """Read "16", or "16x2048" with a context of its own."""
    found = _DECODE_SHAPE.fullmatch(item.strip())
    if found is None:
        raise _not_understood("--decode-batch", "whole numbers N or NxCONTEXT", item)
    batch, own_context = found.groups()
    return int(batch), int(own_context or context)


def _classes(names: str) -> tuple[str, ...]:
    classes = tuple(names.split(","))
    for name in classes:
        if name and name not in SERVICE_CLASSES:
            raise typer.BadParameter(
                f"expected {', '.join(SERVICE_CLASSES)} between commas, not {name!r}",
                param_hint="--service-class",
            )
    return classes


def _rate(item: str) -> float:
    try:
        value = float(item)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise _not_understood("--sweep", "numbers", item)
    return value


def _not_understood(option: str, wanted: str, item: str) -> typer.BadParameter:
    """Return the error for an item of a list."""
    return typer.BadParameter(f"expected {wanted} above 0 between commas, not {item!r}", param_hint=option)
