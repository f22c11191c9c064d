"""The options of the load of a benchmark, and the runs that they describe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import typer

from cluster.bench.bench_runs import BenchRun
from cluster.bench.dataset_load import DatasetSettings, Load, RunSettings
from cluster.bench.datasets import Dataset, open_dataset, parse_dataset
from cluster.bench.serving_load import (
    Workload,
)
from cluster.bench.targets import TargetModel
from kvtransfer.request_facts import SERVICE_CLASSES

DEFAULT_CONCURRENCY = 8
_DEFAULT_REQUESTS = 64

_DEFAULT_OUTPUT_TOKENS = 32


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
            help=f"Requests, or sessions, in flight without a rate; default: {DEFAULT_CONCURRENCY}.",
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
DRAWN_OPTIONS = {
    "concurrency",
    "rate",
    "sweep",
    "input_tokens",
    "output_tokens",
    "shared_prefix",
    "prefix_groups",
}
_ALWAYS = {"vocab_size", "seed", "service_class"}
_KIND_TO_OPTIONS = {
    "": DRAWN_OPTIONS | {"requests"},
    "lengths": DRAWN_OPTIONS | {"requests", "length_spread"},
    "sessions": DRAWN_OPTIONS | {"sessions", "turns", "think_s"},
    "sharegpt": {"concurrency", "rate", "sweep", "requests", "output_tokens", "turns", "think_s"},
    "mooncake": {"requests", "output_tokens", "time_scale"},
}
# Whose rates and concurrency are those of sessions.
_WITH_SESSIONS = ("sessions", "sharegpt")


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
        concurrency = 0 if rate > 0 or is_timed else load.concurrency or DEFAULT_CONCURRENCY
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
        concurrency=0 if rate_per_s > 0 else load.concurrency or DEFAULT_CONCURRENCY,
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
