"""Run the benchmark of a served model at each of its loads, and show the figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import plotext
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cluster.bench.dataset_load import Load
from cluster.bench.overload_curve import OverloadPlan, overload_table, run_overload, verdict
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
from cluster.bench.targets import Target, TargetModel
from cluster.cli.terminal import NONE, made_table
from cluster.errors import BenchError
from kvtransfer.common.clock import Clock

_NUM_BINS = 30
_NUM_TICKS = 5

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
