"""`tandem bench scaling`: a trace through the autoscaling policy and plainer ones, without a cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cluster.bench.trace_file import read_trace
from cluster.cli.terminal import AsJson, err, made_table, out
from cluster.errors import BenchError
from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.measured_rates import StepCost
from cluster.scaling.other_policies import TargetQueue, keep_counts
from cluster.scaling.policy import decide
from cluster.scaling.samples import DECODE, PREFILL, PoolView
from cluster.scaling.scaling_replay import Replayed, replay
from cluster.scaling.simulation import Arrival, ServiceModel

# Requests a prefill replica that the queue target aims at: Ray Serve's default.
_PREFILL_TARGET = 2.0


def bench_scaling(
    trace: Annotated[Path, typer.Option(help="Arrivals in Mooncake's format (JSON lines).")],
    speed: Annotated[float, typer.Option(min=0.001, help="The trace is run this many times as fast.")] = 1.0,
    seconds: Annotated[float, typer.Option(min=1, help="How much of it, in its own time.")] = math.inf,
    prefill_tok_s: Annotated[float, typer.Option(min=1, help="Of one replica.")] = 20_000.0,
    step_ms: Annotated[float, typer.Option(min=0.001, help="A decode step's fixed part.")] = 12.0,
    sequence_ms: Annotated[float, typer.Option(min=0, help="What each sequence adds to a step.")] = 0.3,
    kv_tokens: Annotated[int, typer.Option(min=256, help="Of one replica.")] = 400_000,
    max_sequences: Annotated[int, typer.Option(min=1, help="In one step of a replica.")] = 64,
    start_s: Annotated[float, typer.Option(min=0, help="Until a new replica is ready.")] = 45.0,
    max_replicas: Annotated[int, typer.Option(min=1, help="The limit of each pool.")] = 16,
    slo_ttft_ms: Annotated[float, typer.Option(min=1)] = 2000.0,
    slo_itl_ms: Annotated[float, typer.Option(min=1)] = 50.0,
    lend: Annotated[bool, typer.Option(help="Idle replicas may play the other role.")] = False,
    moves: Annotated[bool, typer.Option(help="Show each move with its reason.")] = False,
    as_json: AsJson = False,
) -> None:
    """Replay a trace through the autoscaling policy and plainer ones, without a cluster."""
    arrivals = read_arrivals(trace, speed=speed, last_s=seconds / speed)
    if not arrivals:
        raise BenchError(f"{trace} has no request")
    model = ServiceModel(
        prefill_tok_s, StepCost(step_ms / 1e3, sequence_ms / 1e3), kv_tokens, 64, max_sequences, start_s
    )
    limits = PoolLimits(min=1, max=max_replicas)
    config = ScalingConfig(
        autoscale=True,
        change_roles=lend,
        pools={PREFILL: limits, DECODE: limits},
        ttft_slo_s=slo_ttft_ms / 1e3,
        itl_slo_s=slo_itl_ms / 1e3,
    )
    with err.status("replaying"):
        runs = compare(arrivals, model, config, limits)
    if as_json:
        for name, run in runs:
            print(json.dumps(scaling_json(name, run)), flush=True)
        return
    out.print(scaling_table(runs, arrivals))
    if moves:
        for change in runs[0][1].changes:
            count = f"{change.before} -> {change.after}"
            out.print(f"{change.at:7.0f} s  {change.pool} {count}: {change.reason}", soft_wrap=True)


def compare(
    arrivals: Sequence[Arrival], model: ServiceModel, config: ScalingConfig, limits: PoolLimits
) -> list[tuple[str, Replayed]]:
    """Replay with the policy, with counts fixed at its mean and at its peak, and with a queue target for each
    pool."""

    def pools(prefill: int, decode: int) -> list[PoolView]:
        counts = ((PREFILL, prefill), (DECODE, decode))
        return [
            PoolView(role, role, count, model.max_sequences, model.block_tokens, limits)
            for role, count in counts
        ]

    ours = replay(arrivals, pools(limits.min, limits.min), model, config, decide)
    counts = [count for _, count in ours.counts]
    mean = {name: max(1, round(sum(each[name] for each in counts) / len(counts))) for name in counts[0]}
    peak = {name: max(each[name] for each in counts) for name in counts[0]}
    batch = model.step.largest_batch(config.itl_slo_s, model.max_sequences)
    plain = TargetQueue(_PREFILL_TARGET, config.target_load * batch)
    runs = [("policy", ours)]
    for name, fixed in (("fixed, mean", mean), ("fixed, peak", peak)):
        at = f"{name} {fixed[PREFILL]}+{fixed[DECODE]}"
        runs.append((at, replay(arrivals, pools(*fixed.values()), model, config, keep_counts)))
    runs.append(("queue target", replay(arrivals, pools(limits.min, limits.min), model, config, plain)))
    return runs


def scaling_json(name: str, run: Replayed) -> dict[str, Any]:
    """Return one run as JSON values."""
    counts = [count for _, count in run.counts]
    return {
        "what": "scaling",
        "scheme": name,
        "num_requests": len(run.jobs),
        "replica_s": {pool: round(seconds, 1) for pool, seconds in run.replica_s.items()},
        "peak_replicas": {pool: max(each[pool] for each in counts) for pool in counts[0]},
        "num_moves": len(run.changes),
        "num_role_changes": len(run.role_changes),
        "ttft_share": run.ttft_share,
        "itl_share": run.itl_share,
        "good_share": run.good_share,
        "num_preemptions": run.num_preemptions,
    }


def scaling_table(runs: Sequence[tuple[str, Replayed]], arrivals: Sequence[Arrival]) -> Table:
    """Compare the runs. Shares are of requests (TTFT, good) and of gaps between tokens (ITL) that met the
    objective."""
    title = f"{len(arrivals)} requests in {arrivals[-1].at:.0f} s; good: first token and mean gap in time"
    table = made_table(
        title, "scheme", numbers=("replica-s", "ratio", "peak", "moves", "TTFT ok", "ITL ok", "good")
    )
    base = runs[0][1].total_replica_s
    for name, run in runs:
        row = scaling_json(name, run)
        table.add_row(
            name,
            f"{run.total_replica_s:.0f}",
            f"{run.total_replica_s / base:.2f}",
            "+".join(str(count) for count in row["peak_replicas"].values()),
            str(row["num_moves"] + row["num_role_changes"]),
            f"{run.ttft_share:.1%}",
            f"{run.itl_share:.1%}",
            f"{run.good_share:.1%}",
        )
    return table


def read_arrivals(path: Path, *, speed: float = 1.0, last_s: float = math.inf) -> list[Arrival]:
    """Return the arrivals in the first `last_s` seconds of a trace, `speed` times as fast. `BenchError` names
    the line that is none."""
    arrivals = []
    for request in read_trace(path, needs_blocks=False):
        at = request.timestamp_ms / 1e3 / speed
        if at <= last_s:
            arrivals.append(Arrival(at, request.input_length, max(1, request.output_length)))
    return sorted(arrivals)
