"""Autoscaling beside the best static split of as many replica-hours, as JSON lines, in virtual time.

A simulated cluster of the code that serves, with the scaler that serves at its period and replicas that take
a minute to start, gets three loads:

- `public`, with `--trace FILE` (Mooncake's format): its first requests, whose rate hardly changes.
  Autoscaling begins with the best static split, and shall keep 0.98 of its goodput.
- `diurnal`: half an hour whose rate rises from a tenth of its peak and falls. Autoscaling shall have 1.1
  times the goodput.
- `shift`: long prompts with short answers, then short ones with long answers. 1.1 times as well.

A good request keeps both objectives. Of each number of replicas the best split is searched from the split of
the means of the autoscaled counts; between the two whole numbers around the mean of these, goodput is
interpolated.

    python -m benchmarks.autoscaling [--trace FILE] [--loads public,diurnal,shift] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cluster.bench.simulated_trace import FileTrace
from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.simulation.run_simulation import Simulated, SimulationPlan, run_simulation
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import DrawnLengths, SimulatedSession, trace_sessions
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.simulated_scaling import PlannedScaling
from cluster.simulation.simulated_serve import ReplicaTimes
from cluster.simulation.simulation_result import SimulatedObjectives
from cluster.simulation.step_model import StepModel
from cluster.simulation.varying_load import varying_sessions

NUM_TRACED = 3000
MOST = 12
START_S = 60.0
SPAN_S = 1800.0
# A prompt of 4,000 tokens takes 4 s, and 5 sequences of as many tokens decode in steps of 186 ms.
SLOW = SimulatedEngine(
    StepModel(0.08, 2e-2, 3e-7, 1 / 1000), num_blocks=500, block_tokens=256, max_sequences=32
)
# A prompt of 12,000 tokens takes 0.75 s, and 20 sequences behind as many decode in steps of 34 ms.
FAST = SimulatedEngine(
    StepModel(0.015, 2e-4, 6e-8, 1 / 16_000), num_blocks=1000, block_tokens=512, max_sequences=64
)


class Load(NamedTuple):
    """A load, the replicas that it is for, how many of them there are at the beginning, and what autoscaling
    shall have of the goodput of the best static split."""

    name: str
    sessions: Callable[[], Iterable[SimulatedSession]]
    engine: SimulatedEngine
    objectives: SimulatedObjectives
    counts: tuple[int, int]
    least_ratio: float


class Run(NamedTuple):
    """A simulation: how many requests kept the objectives, and how many replicas there were on average."""

    num_good: int
    mean_replicas: float
    simulated: Simulated


def diurnal(at: float) -> float:
    """Return the requests a second: 0.1 at night, 1 at noon."""
    return 0.55 - 0.45 * math.cos(2 * math.pi * at / SPAN_S)


def shifting(at: float) -> DrawnLengths:
    """Return the lengths, which change in the middle within a tenth of the time."""
    share = min(1.0, max(0.0, (at - 0.45 * SPAN_S) / (0.1 * SPAN_S)))
    return DrawnLengths(round(6000 - 5000 * share), round(20 + 180 * share))


def loads(names: Iterable[str], trace: Path | None, num_traced: int, seed: int) -> list[Load]:
    """Return the loads of these names; the public one only with a trace."""
    slow = SimulatedObjectives(15.0, 0.2)
    made = [
        Load(
            "diurnal",
            lambda: varying_sessions(diurnal, lambda at: DrawnLengths(4000, 50), SPAN_S, seed),
            SLOW,
            slow,
            (1, 1),
            1.1,
        ),
        Load(
            "shift", lambda: varying_sessions(lambda at: 0.5, shifting, SPAN_S, seed), SLOW, slow, (4, 1), 1.1
        ),
    ]
    if trace is not None:
        recorded = FileTrace(trace, num_traced)
        made.insert(
            0,
            Load(
                "public",
                lambda: trace_sessions(recorded),
                FAST,
                SimulatedObjectives(5.0, 0.1),
                (3, 3),
                0.98,
            ),
        )
    return [load for load in made if load.name in names]


def run(load: Load, counts: tuple[int, int], scaling: PlannedScaling | None = None) -> Run:
    """Simulate the load with so many prefill and decode replicas, which `scaling` changes."""
    roles = [("prefill", load.engine)] * counts[0] + [("decode", load.engine)] * counts[1]
    began_s = time.process_time()
    simulated = run_simulation(
        SimulationPlan(ClusterShape(roles), load.sessions(), load.objectives, scaling=scaling)
    )
    result = simulated.result
    num_good = sum(map(load.objectives.kept_by, result.records))
    mean = result.replica_s / result.span_s
    figures = result.as_json()
    told = {name: figures[name] for name in ("requests", "refused", "ttft_p99_s", "tpot_p99_s", "moved")}
    show(
        load=load.name,
        scheme="static" if scaling is None else "autoscaled",
        begins=f"{counts[0]}+{counts[1]}",
        good=num_good,
        good_share=round(num_good / len(result.records), 4),
        mean_replicas=round(mean, 2),
        moves=len(simulated.moves),
        process_s=round(time.process_time() - began_s, 1),
        **told,
    )
    return Run(num_good, mean, simulated)


def best_split(load: Load, num_replicas: int, share: float, known: dict[tuple[int, int], Run]) -> Run:
    """Return the run of the best split of so many replicas, searched from this share of prefill upward and
    downward until goodput falls."""

    def of(num_prefill: int) -> Run:
        counts = num_prefill, num_replicas - num_prefill
        if counts not in known:
            known[counts] = run(load, counts)
        return known[counts]

    num_prefill = min(max(1, round(share * num_replicas)), num_replicas - 1)
    best = of(num_prefill)
    for step in (1, -1):
        other = num_prefill + step
        while 1 <= other < num_replicas and (found := of(other)).num_good > best.num_good:
            best, other = found, other + step
    return best


def prefill_share(counts: tuple[int, int], simulated: Simulated) -> float:
    """Return the share of the replicas that were ordered for prefill, on average."""
    end_s = simulated.result.span_s
    num_prefill, num_all = 0.0, 0.0
    for pool, began in zip(("prefill", "decode"), counts, strict=True):
        points = [(0.0, began), *((move.at, move.after) for move in simulated.moves if move.pool == pool)]
        ends = [at for at, _ in points[1:]] + [end_s]
        total = sum(count * (end - at) for (at, count), end in zip(points, ends, strict=True))
        num_prefill += total if pool == "prefill" else 0.0
        num_all += total
    return num_prefill / num_all


def scaling_of(load: Load, **settings: Any) -> PlannedScaling:
    """Return autoscaling of both pools for the objectives of the load, with the default settings."""
    limits = PoolLimits(min=1, max=MOST)
    config = ScalingConfig(
        autoscale=True,
        pools={"prefill": limits, "decode": limits},
        ttft_slo_s=load.objectives.ttft_s,
        itl_slo_s=load.objectives.tpot_s,
        **settings,
    )
    return PlannedScaling(config, ReplicaTimes(START_S))


def judge(load: Load, *, has_moves: bool) -> bool:
    """Compare autoscaling with static splits; return whether it keeps the limit."""
    known: dict[tuple[int, int], Run] = {}
    counts = load.counts
    if load.least_ratio < 1:
        best = best_split(load, sum(counts), counts[0] / sum(counts), known)
        counts = next(split for split, each in known.items() if each is best)
    ours = run(load, counts, scaling_of(load))
    if has_moves:
        for move in ours.simulated.moves:
            show(at=round(move.at), pool=move.pool, before=move.before, after=move.after, why=move.reason)
    share = prefill_share(counts, ours.simulated)
    low = max(2, math.floor(ours.mean_replicas))
    few, many = (best_split(load, number, share, known) for number in (low, low + 1))
    part = ours.mean_replicas - low
    static = few.num_good + part * (many.num_good - few.num_good)
    ratio = ours.num_good / static
    show(
        figure=f"autoscaled over static goodput, {load.name}",
        limit=load.least_ratio,
        ratio=round(ratio, 4),
        mean_replicas=round(ours.mean_replicas, 2),
    )
    return ratio >= load.least_ratio


def show(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=NUM_TRACED)
    parser.add_argument("--loads", default="public,diurnal,shift")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--moves", action="store_true", help="show each move with its reason")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    judged = [
        judge(load, has_moves=arguments.moves)
        for load in loads(arguments.loads.split(","), arguments.trace, arguments.requests, arguments.seed)
    ]
    raise SystemExit(not all(judged))


if __name__ == "__main__":
    main()
