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
from cluster.bench.serving_figures import (
    MAX_TURN,
    PERCENTILES,
    Objectives,
    ServingFigures,
    by_class,
    by_turn,
    figures_table,
    knee,
    percent,
    summarize,
)
from cluster.bench.serving_load import BenchRequest, Workload, run_sessions
from cluster.bench.targets import Target, TargetModel
from cluster.cli.terminal import made_table
from cluster.errors import BenchError
from kvtransfer.common.clock import Clock

_NUM_BINS = 30
_NUM_TICKS = 5


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


class BenchResult(NamedTuple):
    """The figures of one run, those of its classes and turns, and what they are figures of."""

    label: str
    described: dict[str, Any]
    figures: ServingFigures
    # Empty where all requests were of one class.
    classes: dict[str, ServingFigures]
    # As of `by_turn`.
    turns: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        stats = {**self.described, **self.figures.as_json()}
        if self.classes:
            stats["classes"] = {name: each.as_json() for name, each in self.classes.items()}
        if self.turns:
            stats["turns"] = self.turns
        return stats


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
    results: list[BenchResult] = []
    records: list[BenchRequest] = []
    for each in runs:
        load = each.load(target.model)
        records = await _run_one(target, each, load, clock, console)
        described = {
            "what": "serve",
            "model": target.model.name,
            "offered_per_s": each.rate_per_s or None,
            "concurrency": each.concurrency or None,
            **each.described,
            "num_sessions": len(load.sessions),
            "num_left_out": load.num_left_out,
            "num_unsent": load.num_requests - len(records),
        }
        figures = summarize(records, objectives)
        result = BenchResult(each.label, described, figures, by_class(records, objectives), by_turn(records))
        results.append(result)
        if as_json:
            print(json.dumps(result.as_json()), flush=True)
    reasons = [reason for it in results if (reason := it.figures.first_reason)]
    if reasons and not any(it.figures.num_ok for it in results):
        raise BenchError(f"no request finished; the first: {reasons[0]}")
    if as_json:
        if len(results) > 1:
            print(json.dumps({"what": "knee", "offered_per_s": knee(_good_shares(results))}))
        return
    _show(results, records, reasons, console)


def _show(
    results: Sequence[BenchResult],
    records: Sequence[BenchRequest],
    reasons: Sequence[str],
    console: Console,
) -> None:
    """Print what is for people."""
    columns = [pair for it in results for pair in ((it.label, it.figures), *it.classes.items())]
    console.print(figures_table(columns, "serving benchmark"))
    if any(it.turns for it in results):
        console.print(turns_table([(it.label, it.turns) for it in results]))
    if left_out := sum(it.described["num_left_out"] for it in results):
        console.print(f"{left_out} requests were left out: they do not fit into the model's context")
    if reasons:
        console.print(f"not every request finished; the first: {reasons[0]}", markup=False, soft_wrap=True)
    if len(results) > 1:
        points = [(offered_requests_per_s(it.as_json()), it.figures.goodput_per_s) for it in results]
        console.print(sweep_plot(points, min(console.width, 100)))
        best = knee(_good_shares(results))
        labels = {it.described["offered_per_s"]: it.label for it in results}
        console.print(f"knee: {'below the lowest rate' if best is None else labels[best]}")
    elif ttfts := [record.ttft_s * 1e3 for record in records if record.outcome == "ok"]:
        console.print(histogram("TTFT", ttfts, min(console.width, 100)))


def offered_requests_per_s(stats: dict[str, Any]) -> float:
    """Return the load that was offered; what arrives at the rate may be sessions of several requests."""
    return float(stats["offered_per_s"] * stats["num_requests"] / stats["num_sessions"])


def _good_shares(results: Sequence[BenchResult]) -> list[tuple[float, float]]:
    return [(it.described["offered_per_s"], it.figures.good_share) for it in results]


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
                percent(turn["cached_share"]),
            )
    return table


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
