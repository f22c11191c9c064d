"""`tandem bench serve`: the command, what is sent, and what is shown of it."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import plotext
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cluster.bench.datasets import (
    Dataset,
    DatasetSettings,
    Load,
    RunSettings,
    open_dataset,
    parse_dataset,
)
from cluster.bench.grpc_target import grpc_target
from cluster.bench.overload_curve import MULTIPLES, OverloadPlan, overload_table, run_overload, verdict
from cluster.bench.serving_load import (
    MAX_TURN,
    PERCENTILES,
    BenchRequest,
    Objectives,
    Workload,
    by_class,
    by_turn,
    knee,
    run_sessions,
    summarize,
)
from cluster.bench.targets import Target, TargetModel, http_target
from cluster.cli.gateway_options import InferenceOptions, gateway_options, spliced_options
from cluster.cli.terminal import NONE, AsJson, err, made_table, out, run
from cluster.errors import BenchError
from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.request_facts import SERVICE_CLASSES

_NUM_BINS = 30
_NUM_TICKS = 5
_MULTIPLES = ",".join(f"{multiple:g}" for multiple in MULTIPLES)
_DEFAULT_REQUESTS = 64
_DEFAULT_CONCURRENCY = 8
_DEFAULT_OUTPUT_TOKENS = 32


# What is shown where there were any.
_LOST = (
    ("refused", "num_refused"),
    ("expired", "num_expired"),
    ("timed out", "num_timed_out"),
    ("failed", "num_failed"),
)


class BenchRun(NamedTuple):
    """One run: of a sweep there are several."""

    label: str
    rate_per_s: float
    # 0: sent when their time has come.
    concurrency: int
    # Makes what is sent to the model.
    load: Callable[[TargetModel], Load]
    # What the figures are figures of.
    described: dict[str, Any]
    service_classes: tuple[str, ...] = ("",)


async def run_serving_bench(
    target: Target,
    runs: Sequence[BenchRun],
    objectives: Objectives,
    clock: Clock,
    console: Console,
    *,
    as_json: bool,
) -> None:
    """Make the runs one after the other; print a table and a plot (with several rates also the knee), or JSON
    lines."""
    results: list[tuple[str, dict[str, Any]]] = []
    records: list[BenchRequest] = []
    for each in runs:
        load = each.load(target.model)
        records = await _run_one(target, each, load, clock, console)
        stats = {
            "what": "serve",
            "model": target.model.name,
            "offered_per_s": each.rate_per_s or None,
            "concurrency": each.concurrency or None,
            **each.described,
            "num_sessions": len(load.sessions),
            "num_left_out": load.num_left_out,
            "num_unsent": load.num_requests - len(records),
            **summarize(records, objectives),
        }
        if classes := by_class(records, objectives):
            stats["classes"] = classes
        if turns := by_turn(records):
            stats["turns"] = turns
        results.append((each.label, stats))
        if as_json:
            print(json.dumps(stats), flush=True)
    reasons = [stats["first_reason"] for _, stats in results if stats["first_reason"]]
    if reasons and not any(stats["num_ok"] for _, stats in results):
        raise BenchError(f"no request finished; the first: {reasons[0]}")
    if as_json:
        if len(results) > 1:
            print(json.dumps({"what": "knee", "offered_per_s": knee(_good_shares(results))}))
        return
    _show(results, records, reasons, console)


def _show(
    results: Sequence[tuple[str, dict[str, Any]]],
    records: Sequence[BenchRequest],
    reasons: Sequence[str],
    console: Console,
) -> None:
    """Print what is for people."""
    console.print(
        bench_table([pair for label, stats in results for pair in ((label, stats), *_classes_of(stats))])
    )
    if any(stats.get("turns") for _, stats in results):
        console.print(turns_table([(label, stats.get("turns", [])) for label, stats in results]))
    if left_out := sum(stats["num_left_out"] for _, stats in results):
        console.print(f"{left_out} requests were left out: they do not fit into the model's context")
    if reasons:
        console.print(f"not every request finished; the first: {reasons[0]}", markup=False, soft_wrap=True)
    if len(results) > 1:
        points = [(offered_requests_per_s(stats), stats["goodput_per_s"]) for _, stats in results]
        console.print(sweep_plot(points, min(console.width, 100)))
        best = knee(_good_shares(results))
        labels = {stats["offered_per_s"]: label for label, stats in results}
        console.print(f"knee: {'below the lowest rate' if best is None else labels[best]}")
    elif ttfts := [record.ttft_s * 1e3 for record in records if record.outcome == "ok"]:
        console.print(histogram("TTFT", ttfts, min(console.width, 100)))


def _classes_of(stats: dict[str, Any]) -> Sequence[tuple[str, dict[str, Any]]]:
    return tuple(stats.get("classes", {}).items())


def offered_requests_per_s(stats: dict[str, Any]) -> float:
    """Return the load that was offered; what arrives at the rate may be sessions of several requests."""
    return float(stats["offered_per_s"] * stats["num_requests"] / stats["num_sessions"])


def _good_shares(results: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[float, float]]:
    return [(stats["offered_per_s"], stats["good_share"]) for _, stats in results]


async def run_overload_bench(
    target: Target,
    plan: OverloadPlan,
    objectives: Objectives,
    clock: Clock,
    console: Console,
    *,
    as_json: bool,
) -> None:
    """Offer what the plan says; print JSON lines, or a table and the verdict."""
    drawn = replace(plan.workload, vocab_size=plan.workload.vocab_size or target.model.vocab_size)

    async def run_one(label: str, workload: Workload) -> list[BenchRequest]:
        each = BenchRun(
            label,
            workload.rate_per_s,
            workload.concurrency,
            lambda _: Load(workload.sessions()),
            {},
            workload.service_classes,
        )
        return await _run_one(target, each, each.load(target.model), clock, console)

    records = await run_overload(plan._replace(workload=drawn), objectives, run_one)
    if as_json:
        for record in records:
            print(json.dumps({**record, "model": target.model.name}), flush=True)
        return
    console.print(overload_table(records))
    console.print(verdict(records), markup=False, soft_wrap=True)


async def _run_one(
    target: Target, each: BenchRun, load: Load, clock: Clock, console: Console
) -> list[BenchRequest]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(each.label, total=load.num_requests)
        return await run_sessions(
            load.sessions,
            each.concurrency,
            target.send,
            clock,
            lambda _: progress.advance(task),
            each.service_classes,
        )


def bench_table(runs: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Return one column for each run of `summarize`, headed by its load."""
    table = made_table("serving benchmark", "", numbers=[label for label, _ in runs])
    stats = [figure for _, figure in runs]
    table.add_row("finished", *(f"{run['num_ok']} of {run['num_requests']}" for run in stats))
    for name, key in _LOST:
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
    table.add_row("prompt tokens cached", *(_percent(run["cached_share"]) for run in stats))
    return table


def turns_table(runs: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> Table:
    """Return a row for each turn of each run's sessions."""
    numbers = ["turn", "finished", "input\ntokens", *(f"TTFT\np{rank}, ms" for rank in PERCENTILES), "cached"]
    table = made_table("turns of sessions", "load", numbers=numbers)
    for label, turns in runs:
        for turn in turns:
            table.add_row(
                label,
                f"{MAX_TURN} on" if turn["or_later"] else str(turn["turn"]),
                str(turn["num_ok"]),
                f"{turn['input_tokens']:.0f}",
                *(f"{turn['ttft_ms'][f'p{rank}']:.1f}" for rank in PERCENTILES),
                _percent(turn["cached_share"]),
            )
    return table


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


def histogram(name: str, values_ms: Sequence[float], width: int) -> Text:
    """Plot the distribution of a latency as text."""
    figure = _empty_figure(f"{name}, ms: requests", width, 12)
    figure.draw(figure.hist(list(values_ms), bins=_NUM_BINS))
    most = int(np.histogram(values_ms, _NUM_BINS)[0].max())
    figure.ruler("y").ticks(list(range(0, most + 1, math.ceil(most / _NUM_TICKS))))
    low, high = min(values_ms), max(values_ms)
    places = [low + (high - low) * number / _NUM_TICKS for number in range(_NUM_TICKS + 1)]
    figure.ruler("x").ticks(places, [f"{place:.0f}" if high >= 100 else f"{place:.1f}" for place in places])
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


# ----------------------------------------------------------------------------------------------
# The command.


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What is sent. None: a default, for those datasets for which the option means something."""

    dataset: Annotated[
        str | None,
        typer.Option(
            help="sharegpt:FILE, mooncake:FILE, sessions, or lengths:KIND with fixed, uniform, lognormal or "
            "a CSV file. Default: prompts of one length."
        ),
    ] = None
    requests: Annotated[
        int | None, typer.Option(min=1, help=f"Requests of each run; default: {_DEFAULT_REQUESTS}.")
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Requests, or sessions, in flight without a rate; default: {_DEFAULT_CONCURRENCY}.",
        ),
    ] = None
    rate: Annotated[
        float | None, typer.Option(min=0, help="Poisson arrivals a second, of sessions where there are any.")
    ] = None
    sweep: Annotated[str | None, typer.Option(help="Rates to run one after the other: 1,2,4,8.")] = None
    input_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a prompt, or of what a turn adds to it; default: 256.")
    ] = None
    output_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Of an answer; default: {_DEFAULT_OUTPUT_TOKENS}. Of recorded answers: the most; "
            "default: all.",
        ),
    ] = None
    shared_prefix: Annotated[
        int | None, typer.Option(min=0, help="Tokens that a group of prompts, or of sessions, shares.")
    ] = None
    prefix_groups: Annotated[int | None, typer.Option(min=1, help="Groups; default: 1.")] = None
    length_spread: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="With lengths:uniform: the part of the mean that lengths differ from it by; with "
            "lengths:lognormal: sigma. Default: 0.5.",
        ),
    ] = None
    sessions: Annotated[
        int | None, typer.Option(min=1, help="With --dataset sessions: how many; default: 8.")
    ] = None
    turns: Annotated[
        int | None,
        typer.Option(min=1, help="Of a session; default: 4. Of recorded conversations: the most."),
    ] = None
    think_s: Annotated[
        float | None,
        typer.Option(min=0, help="Mean seconds between an answer and the next turn; default: 0."),
    ] = None
    time_scale: Annotated[
        float | None,
        typer.Option(min=0, help="With mooncake: times are multiplied by this; 0.5: twice as fast."),
    ] = None
    vocab_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Token ids are drawn below this; default: the model's. Over HTTP, where it is not "
            "known: 1000.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0)] = 0
    service_class: Annotated[
        str, typer.Option(help="Of the requests; of several, interactive,batch, they take turns.")
    ] = ""

    @property
    def rates(self) -> list[float]:
        """Of the runs; 0: no rate."""
        if self.sweep is not None:
            return [read_rate(item, "--sweep") for item in self.sweep.split(",")]
        return [self.rate or 0.0]


# Which options of `LoadOptions` have an effect with each dataset; the others are refused there.
_DRAWN = {"concurrency", "rate", "sweep", "input_tokens", "output_tokens", "shared_prefix", "prefix_groups"}
_ALWAYS = {"vocab_size", "seed", "service_class"}
_KIND_TO_OPTIONS = {
    "": _DRAWN | {"requests"},
    "lengths": _DRAWN | {"requests", "length_spread"},
    "sessions": _DRAWN | {"sessions", "turns", "think_s"},
    "sharegpt": {"concurrency", "rate", "sweep", "requests", "output_tokens", "turns", "think_s"},
    "mooncake": {"requests", "output_tokens", "time_scale"},
}
# Whose rates and concurrency are those of sessions.
_WITH_SESSIONS = ("sessions", "sharegpt")
# With `--overload`, which offers rates of its own.
_OVERLOAD_OPTIONS = _DRAWN - {"rate", "sweep"} | {"requests"}


def read_dataset(load: LoadOptions) -> Dataset | None:
    """Return the named dataset; a usage error where there is none such, or for options that have no effect
    with it."""
    dataset = None
    if load.dataset is not None:
        try:
            dataset = parse_dataset(load.dataset)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--dataset") from None
    allowed = set(_KIND_TO_OPTIONS[dataset.kind if dataset else ""])
    if dataset is not None and dataset.is_table:
        allowed -= {"input_tokens", "output_tokens", "length_spread"}
    if dataset is not None and dataset.name == "fixed":
        allowed -= {"length_spread"}
    where = f"--dataset {load.dataset}" if dataset else "prompts of one length; name a --dataset"
    refuse_others(load, allowed | {"dataset"}, where)
    if load.sweep is not None:
        for name in ("rate", "concurrency"):
            if getattr(load, name) is not None:
                raise typer.BadParameter(
                    "contradict each other: a sweep has rates", param_hint=f"--sweep, --{name}"
                )
    if load.rate and load.concurrency is not None:
        raise typer.BadParameter(
            "contradict each other: with a rate, any number is in flight", param_hint="--rate, --concurrency"
        )
    return dataset


def refuse_others(load: LoadOptions, allowed: set[str], where: str) -> None:
    """Raise a usage error that names the options beside `allowed` that were given."""
    names = [
        name
        for name in LoadOptions.__dataclass_fields__
        if name not in allowed | _ALWAYS and getattr(load, name) is not None
    ]
    if names:
        flags = ", ".join("--" + name.replace("_", "-") for name in names)
        raise typer.BadParameter(f"no effect with {where}", param_hint=flags)


def planned_runs(load: LoadOptions, dataset: Dataset | None) -> list[BenchRun]:
    """Return the runs that the options describe; `BenchError` where a file cannot be read."""
    classes = read_classes(load.service_class)
    if dataset is None:
        workloads = [
            replace(workload_of(load, rate), seed=load.seed + index) for index, rate in enumerate(load.rates)
        ]
        return [
            BenchRun(
                _label(it.rate_per_s, it.concurrency),
                it.rate_per_s,
                it.concurrency,
                partial(_load_of, it),
                {
                    "input_tokens": it.input_tokens,
                    "output_tokens": it.output_tokens,
                    "shared_prefix_tokens": it.shared_prefix_tokens,
                    "prefix_groups": it.num_groups,
                },
                classes,
            )
            for it in workloads
        ]
    make = open_dataset(dataset, dataset_settings(load))
    is_timed = dataset.kind == "mooncake"
    runs = []
    for index, rate in enumerate(load.rates):
        concurrency = 0 if rate > 0 or is_timed else load.concurrency or _DEFAULT_CONCURRENCY
        what = "sessions " if dataset.kind in _WITH_SESSIONS else ""
        label = f"x {load.time_scale or 1:g} time" if is_timed else _label(rate, concurrency, what)
        bind = partial(_dataset_load, make, rate, load.seed + index, load.vocab_size or 0)
        runs.append(BenchRun(label, rate, concurrency, bind, {"dataset": load.dataset}, classes))
    return runs


def _label(rate_per_s: float, concurrency: int, what: str = "") -> str:
    return f"{rate_per_s:g} {what}a second" if rate_per_s > 0 else f"{concurrency} {what}at once"


def _load_of(workload: Workload, model: TargetModel) -> Load:
    return Load(replace(workload, vocab_size=workload.vocab_size or model.vocab_size).sessions())


def _dataset_load(
    make: Callable[[RunSettings], Load], rate: float, seed: int, vocab_size: int, model: TargetModel
) -> Load:
    return make(RunSettings(rate, seed, vocab_size or model.vocab_size, model.context_tokens))


def workload_of(load: LoadOptions, rate_per_s: float) -> Workload:
    """Return prompts of one length."""
    return Workload(
        num_requests=load.requests or _DEFAULT_REQUESTS,
        concurrency=0 if rate_per_s > 0 else load.concurrency or _DEFAULT_CONCURRENCY,
        rate_per_s=rate_per_s,
        input_tokens=load.input_tokens or 256,
        output_tokens=load.output_tokens or _DEFAULT_OUTPUT_TOKENS,
        shared_prefix_tokens=load.shared_prefix or 0,
        num_groups=load.prefix_groups or 1,
        seed=load.seed,
        vocab_size=load.vocab_size or 0,
        service_classes=read_classes(load.service_class),
    )


def dataset_settings(load: LoadOptions) -> DatasetSettings:
    """Return what is wanted of a dataset."""
    given = {
        "num_requests": load.requests,
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "shared_prefix_tokens": load.shared_prefix,
        "num_groups": load.prefix_groups,
        "length_spread": load.length_spread,
        "num_sessions": load.sessions,
        "num_turns": load.turns,
        "think_s": load.think_s,
        "time_scale": load.time_scale,
    }
    return DatasetSettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


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
            load.concurrency or _DEFAULT_CONCURRENCY,
            duration,
            tuple(read_rate(item, "--multiples") for item in multiples.split(",")),
        )
        run(measure(run_overload_bench, plan))
    else:
        run(measure(run_serving_bench, planned_runs(load, read_dataset(load))))


bench_serve_command = gateway_options(spliced_options(bench_serve, LoadOptions))


def read_classes(names: str) -> tuple[str, ...]:
    """Return the classes between the commas."""
    classes = tuple(names.split(","))
    for name in classes:
        if name and name not in SERVICE_CLASSES:
            raise typer.BadParameter(
                f"expected {', '.join(SERVICE_CLASSES)} between commas, not {name!r}",
                param_hint="--service-class",
            )
    return classes


def read_rate(item: str, option: str) -> float:
    """Return an item of a list of numbers above 0."""
    try:
        value = float(item)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise typer.BadParameter(f"expected numbers above 0 between commas, not {item!r}", param_hint=option)
    return value
