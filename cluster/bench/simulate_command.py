"""`tandem simulate`: a cluster in virtual time, of the code that serves."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.bench.live_engines import LiveCluster, read_live
from cluster.bench.served_call import ServedCall
from cluster.bench.serving_figures import Objectives, ServingFigures, figures_table, summarize
from cluster.bench.simulated_scaling_options import planned_scaling
from cluster.bench.simulation_options import (
    SimulatedLoadOptions,
    SimulatedReplicaOptions,
    check_absent,
    check_choice,
)
from cluster.cli.durations import read_duration_s
from cluster.cli.gateway_options import CallerOptions, gateway_options, spliced_options
from cluster.cli.terminal import NONE, AsJson, die, made_table, out, run
from cluster.errors import BenchError, ConfigError
from cluster.roster.messages import ScalingChange
from cluster.scaling import scaler
from cluster.simulation.planned_failures import parse_failures
from cluster.simulation.run_simulation import Simulated, SimulationPlan, run_simulation
from cluster.simulation.simulated_call import CallRecord
from cluster.simulation.simulation_plots import prepare_plots, save_plots
from cluster.simulation.simulation_result import SimulatedObjectives
from router.config import PolicyName
from workers.errors import CheckpointError

_POLICIES: tuple[str, ...] = get_args(PolicyName)
# The number of notes of the state of all replicas for plots.
_NUM_SAMPLES = 600
# Figures of the cluster, and whether they are shown where all are 0 or not known.
_SHOWN = (
    ("TTFT mean, s", "ttft_mean_s", True),
    ("utilization", "utilization", True),
    ("hit rate", "hit_rate", True),
    ("of that from DRAM", "hits_dram", False),
    ("of that from NVMe", "hits_nvme", False),
    ("of that from other nodes", "hits_remote", False),
    ("written to NVMe, GB", "nvme_written_gb", False),
    ("imbalance of computed prompts", "imbalance", True),
    ("attempts that were repeated", "retried", False),
    ("streams that moved", "moved", False),
    ("replica-hours", "replica_hours", True),
    ("good requests a replica-hour", "good_per_replica_hour", True),
    ("changes of counts and roles", "scaling_changes", False),
    ("a million tokens cost", "cost_per_million_tokens", False),
    ("left out: longer than the KV", "left_out", False),
)


def simulate_options(
    policy: Annotated[
        str, typer.Option(help=f"Of the router, or several to compare: {', '.join(_POLICIES)}; all.")
    ] = _POLICIES[0],
    admission: Annotated[
        bool, typer.Option(help="Without it, requests are routed as they come, and none is refused.")
    ] = True,
    gateways: Annotated[
        int, typer.Option(min=1, max=1000, help="Gateways that exchange their placements.")
    ] = 1,
    failures: Annotated[str, typer.Option(help="r0003@120+60: dies after 120 s, is back 60 s later.")] = "",
    slo_ttft_ms: Annotated[
        float, typer.Option(min=0.1, max=1e7, help="First token of a good request.")
    ] = 5000.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=0.1, max=1e7, help="Each further token of one.")] = 100.0,
    autoscale: Annotated[
        str, typer.Option(help="prefill=1:8,decode=1:8: the pools to scale, and limits.")
    ] = "",
    start_s: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="With --autoscale: until a new replica serves; default: 60."),
    ] = None,
    change_roles: Annotated[
        bool, typer.Option("--change-roles", help="With --autoscale: replicas may play the other role.")
    ] = False,
    moves: Annotated[
        bool,
        typer.Option(
            "--moves", help="With --autoscale: show each change of counts and roles, with its reason."
        ),
    ] = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write a line for each request.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG plots; needs matplotlib.")] = None,
    as_json: AsJson = False,
    *,
    load: SimulatedLoadOptions,
    replicas: SimulatedReplicaOptions,
    to: CallerOptions,
) -> None:
    """Simulate a cluster: what its requests would see, with the router, admission, scheduler, block pool and
    hand-overs that serve.

    Only the time of steps and transfers is modelled: from `--model` and `--hardware`, as `tandem plan`
    predicts it, or from `--utilization`.
    """
    load.check()
    replicas.check()
    if not autoscale:
        check_absent({"--start-s": start_s is not None, "--change-roles": change_roles, "--moves": moves})
    live = _read(load.source, read_duration_s(load.last, "--last"), to) if load.source else None
    if live is not None:
        load, replicas = load.of(live), replicas.as_in(live)
    policies = _POLICIES if policy == "all" else tuple(policy.split(","))
    for name in policies:
        check_choice("--policy", name, _POLICIES)
    try:
        files = {name: _files_of(name if len(policies) > 1 else "", csv_file, plots) for name in policies}
        plan = SimulationPlan(
            replicas.shape(load, policy=policies[0], num_gateways=gateways, holds_back=admission),
            (),
            SimulatedObjectives(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3),
            load.seed,
            tuple(parse_failures(failures)),
            replicas.price_per_s,
            samples_s=load.span_s / _NUM_SAMPLES if plots is not None else 0.0,
            scaling=planned_scaling(
                autoscale, start_s, slo_ttft_ms / 1e3, slo_tpot_ms / 1e3, may_change_roles=change_roles
            ),
        )
        runs = {name: _run(plan.of_policy(name, load.sessions())) for name in policies}
        if any(not simulated.result.records for simulated in runs.values()):
            raise ConfigError(
                "no request was simulated: the load has none, or all are longer than a replica's KV; look at "
                "--trace and --format, or raise --kv-blocks"
            )
        for name, simulated in runs.items():
            _write_files(simulated, *files[name])
    except (ConfigError, BenchError, CheckpointError) as error:
        die(str(error))
    if as_json:
        for name, simulated in runs.items():
            lines = {"moves": [_move_fields(each) for each in simulated.moves]} if moves else {}
            print(json.dumps({"policy": name, **_figures(simulated), **lines}))
    else:
        objectives = Objectives(slo_ttft_ms, slo_tpot_ms)
        _show(runs, objectives, None if live is None else summarize(live.trace.served, objectives))
        if moves:
            _show_moves(runs)


simulate = gateway_options(
    spliced_options(spliced_options(simulate_options, SimulatedLoadOptions), SimulatedReplicaOptions)
)


def _read(address: str, last_s: float, to: CallerOptions) -> LiveCluster:
    """Read a running cluster; the process ends with the sentence of an error."""
    found: list[LiveCluster] = []

    async def read() -> None:
        found.append(await read_live(address, last_s, to))

    run(read())
    return found[0]


def _run(plan: SimulationPlan) -> Simulated:
    """Run it behind a progress bar on the terminal."""
    columns = TextColumn("{task.description}"), SpinnerColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=None)

        def told(now: float, num_ended: int) -> None:
            progress.update(task, description=f"{now:,.0f} s simulated, {num_ended:,} requests ended")

        with _quiet_scaler():
            return run_simulation(plan, told)


@contextlib.contextmanager
def _quiet_scaler() -> Iterator[None]:
    """Keep the scaler's log off the terminal: its moves are figures of the result."""
    log = logging.getLogger(scaler.__name__)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _files_of(policy: str, csv_file: Path | None, plots: Path | None) -> tuple[Path | None, Path | None]:
    """Return where the requests and the plots of a run go, with the policy in the name if that is given.
    Raises `ConfigError` where neither can be written, before anything is simulated."""
    if csv_file is not None:
        csv_file = csv_file.with_stem(f"{csv_file.stem}-{policy}") if policy else csv_file
        _write_csv(csv_file, ())
    if plots is not None:
        plots = plots / policy
        prepare_plots(plots)
    return csv_file, plots


def _write_files(simulated: Simulated, csv_file: Path | None, plots: Path | None) -> None:
    if csv_file is not None:
        _write_csv(csv_file, simulated.result.records)
    if plots is not None:
        save_plots(plots, simulated.result, simulated.time_lines)


def _write_csv(file: Path, records: Iterable[CallRecord]) -> None:
    try:
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer: csv.DictWriter[str] | None = None
            for record in records:
                row = asdict(record)
                if writer is None:
                    writer = csv.DictWriter(stream, list(row))
                    writer.writeheader()
                writer.writerow(row)
    except OSError as error:
        raise ConfigError(f"--csv {file}: {error.strerror}") from error


def _figures(simulated: Simulated) -> dict[str, Any]:
    changes = {"left_out": simulated.num_left_out, "scaling_changes": len(simulated.moves)}
    return simulated.result.as_json() | changes


def _move_fields(move: ScalingChange) -> dict[str, Any]:
    fields = ("at", "pool", "before", "after", "reason")
    return {name: getattr(move, name) for name in fields}


def _show_moves(runs: Mapping[str, Simulated]) -> None:
    """Print a line for each change of counts, and of a role, which leaves the count as it is."""
    for name, simulated in runs.items():
        out.print(f"changes{f' of {name}' if len(runs) > 1 else ''}: {len(simulated.moves)}", markup=False)
        for move in simulated.moves:
            counts = f"{move.before} -> {move.after}" if move.before != move.after else f"{move.after}"
            line = f"{move.at:7.0f} s  {move.pool} {counts}  {move.reason}"
            out.print(line, markup=False, highlight=False, soft_wrap=True)


def _show(runs: Mapping[str, Simulated], objectives: Objectives, recorded: ServingFigures | None) -> None:
    """Print the table of `tandem bench serve`, beside what was `recorded`, and what only a simulation knows
    of all replicas."""
    columns = [("recorded", recorded)] if recorded is not None else []
    for name, simulated in runs.items():
        calls = [ServedCall(record) for record in simulated.result.records]
        columns.append((name if len(runs) > 1 else "simulated", summarize(calls, objectives)))
    out.print(figures_table(columns, "serving, simulated"))
    figures = [_figures(simulated) for simulated in runs.values()]
    table = made_table("cluster", "", numbers=list(runs))
    for name, key, is_always in _SHOWN:
        if is_always or any(each[key] for each in figures):
            table.add_row(name, *(NONE if each[key] is None else f"{each[key]:g}" for each in figures))
    out.print(table)
