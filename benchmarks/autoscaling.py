"""Autoscaling beside the best static split of as many replica-hours, as JSON lines, in virtual time.

A simulated cluster of the code that serves, with the scaler that serves at its period and replicas that take
a minute to start, gets three loads:

- `public`, with `--trace FILE` (Mooncake's format): a part of its requests for each seed, whose rate hardly
  changes. Autoscaling begins with the best static split, and shall keep 0.98 of its goodput.
- `diurnal`: half an hour whose rate rises from a tenth of its peak and falls. Autoscaling shall have 1.1
  times the goodput.
- `shift`: answers get seventeen times longer within three minutes, and prompts stay. 1.1 times as well.
  Engines keep the objective for output tokens, so decode replicas compute prompts, too.
- `swap`: long prompts with short answers, then short ones with long answers, for which about as many replicas
  do. Beside it stands what there is to gain: the goodput if each half had the split that is best for it,
  without any time for a change, over that of the best split for both. That is too little for a limit: 0.95 of
  the best static split shall be kept.

A good request keeps both objectives. Of each number of replicas the best split is searched: from the split of
the means of the autoscaled counts upward and downward until goodput falls. Between the two whole numbers
around the mean of the autoscaled counts, goodput is interpolated. The limit is for the mean of the seeds.
`--queue-target` also runs a policy that keeps the queue of each pool at a target.

    python -m benchmarks.autoscaling [--trace FILE] [--loads public,diurnal,shift,swap] [--seeds 1,2,3]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.queue_target import QueueTarget
from cluster.bench.simulated_trace import FileTrace
from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.policy import Policy, decide
from cluster.simulation.run_simulation import Simulated, SimulationPlan, run_simulation
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import DrawnLengths, SimulatedSession, trace_sessions
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.simulated_scaling import PlannedScaling
from cluster.simulation.simulated_serve import ReplicaTimes
from cluster.simulation.simulation_result import SimulatedObjectives
from cluster.simulation.step_model import StepModel
from cluster.simulation.varying_load import varying_sessions

# Requests of the trace for each seed, one part after another.
NUM_TRACED = 3000
MOST = 12
START_S = 60.0
# With --change-roles.
ROLE_CHANGE_AFTER_S = 10.0
SPAN_S = 1800.0
# A prompt of 4,000 tokens takes 4 s, and 5 sequences of as many tokens decode in steps of 186 ms.
SLOW = SimulatedEngine(
    StepModel(0.08, 2e-2, 3e-7, 1 / 1000), num_blocks=500, block_tokens=256, max_sequences=32
)
# A prompt of 12,000 tokens takes 0.75 s, and 20 sequences behind as many decode in steps of 34 ms.
FAST = SimulatedEngine(
    StepModel(0.015, 2e-4, 6e-8, 1 / 16_000), num_blocks=1000, block_tokens=512, max_sequences=64
)
# Blocks of a usual size, and an objective for output tokens that the engine keeps.
TPOT_S = 0.05
TPOT_BOUND = FAST._replace(num_blocks=4000, block_tokens=128, tpot_objective_s=TPOT_S)
# Requests of a prefill replica that the queue target aims at, Ray Serve's default, and of a decode replica.
PREFILL_TARGET, DECODE_TARGET = 2.0, 4.0


class Load(NamedTuple):
    """A load by its seed, the replicas that it is for, how many of them there are at the beginning, and what
    autoscaling shall have of the goodput of the best static split."""

    name: str
    sessions: Callable[[int], Iterable[SimulatedSession]]
    engine: SimulatedEngine
    objectives: SimulatedObjectives
    counts: tuple[int, int]
    least_ratio: float
    # Whether it changes in the middle, so that each half may have another best split.
    has_halves: bool = False
    # Whether autoscaling begins with the best static split of as many replicas.
    begins_best: bool = False


class Run(NamedTuple):
    """A simulation: how many requests kept the objectives, and how many replicas there were on average."""

    num_good: int
    mean_replicas: float
    simulated: Simulated


def diurnal(at: float) -> float:
    """Return the requests a second: 0.1 at night, 1 at noon."""
    return 0.55 - 0.45 * math.cos(2 * math.pi * at / SPAN_S)


def changed_share(at: float) -> float:
    """Return how far a change in the middle, which takes a tenth of the time, has come."""
    return min(1.0, max(0.0, (at - 0.45 * SPAN_S) / (0.1 * SPAN_S)))


def shifting(at: float) -> DrawnLengths:
    """Return lengths of which answers get longer."""
    return DrawnLengths(6000, round(60 + 940 * changed_share(at)))


def swapping(at: float) -> DrawnLengths:
    """Return lengths of which prompts get shorter, and answers longer."""
    share = changed_share(at)
    return DrawnLengths(round(6000 - 5000 * share), round(20 + 180 * share))


def part_of(trace: Path, num_traced: int, seed: int) -> Iterator[SimulatedSession]:
    """Yield the requests of one part of a trace, the first of which comes at once."""
    sessions = islice(trace_sessions(FileTrace(trace)), (seed - 1) * num_traced, seed * num_traced)
    begins_s = None
    for session in sessions:
        begins_s = session.at_s if begins_s is None else begins_s
        yield session._replace(at_s=session.at_s - begins_s)


def loads(names: Iterable[str], trace: Path | None, num_traced: int) -> list[Load]:
    """Return the loads of these names; the public one only with a trace."""
    slow = SimulatedObjectives(15.0, 0.2)
    made = [
        Load(
            "diurnal",
            lambda seed: varying_sessions(diurnal, lambda at: DrawnLengths(4000, 50), SPAN_S, seed),
            SLOW,
            slow,
            (1, 1),
            1.1,
        ),
        Load(
            "shift",
            lambda seed: varying_sessions(lambda at: 5.0, shifting, SPAN_S, seed),
            TPOT_BOUND,
            SimulatedObjectives(3.0, TPOT_S),
            (1, 2),
            1.1,
        ),
        Load(
            "swap",
            lambda seed: varying_sessions(lambda at: 0.5, swapping, SPAN_S, seed),
            SLOW,
            slow,
            (4, 1),
            0.95,
            has_halves=True,
        ),
    ]
    if trace is not None:
        objectives = SimulatedObjectives(5.0, 0.1)
        public = Load(
            "public",
            lambda seed: part_of(trace, num_traced, seed),
            FAST,
            objectives,
            (4, 5),
            0.98,
            begins_best=True,
        )
        made.insert(0, public)
    return [load for load in made if load.name in names]


def run(load: Load, seed: int, counts: tuple[int, int], scaling: PlannedScaling | None = None) -> Run:
    """Simulate the load with so many prefill and decode replicas, which `scaling` changes."""
    roles = [("prefill", load.engine)] * counts[0] + [("decode", load.engine)] * counts[1]
    began_s = time.process_time()
    simulated = run_simulation(
        SimulationPlan(ClusterShape(roles), load.sessions(seed), load.objectives, scaling=scaling)
    )
    result = simulated.result
    num_good = sum(map(load.objectives.kept_by, result.records))
    mean = result.replica_s / result.span_s
    figures = result.as_json()
    chosen = {name: figures[name] for name in ("requests", "refused", "ttft_p99_s", "tpot_p99_s", "moved")}
    show(
        load=load.name,
        seed=seed,
        scheme=_scheme(scaling),
        begins=f"{counts[0]}+{counts[1]}",
        good=num_good,
        good_share=round(num_good / len(result.records), 4),
        mean_replicas=round(mean, 2),
        moves=len(simulated.moves),
        process_s=round(time.process_time() - began_s, 1),
        **chosen,
    )
    return Run(num_good, mean, simulated)


def _scheme(scaling: PlannedScaling | None) -> str:
    if scaling is None:
        return "static"
    return "autoscaled" if scaling.policy is decide else "queue target"


class StaticSplits:
    """Runs of static splits of one load and seed, each once."""

    def __init__(self, load: Load, seed: int) -> None:
        self._load, self._seed = load, seed
        self._runs: dict[tuple[int, int], Run] = {}

    def run(self, num_prefill: int, num_decode: int) -> Run:
        """Return the run of a split."""
        counts = num_prefill, num_decode
        if counts not in self._runs:
            self._runs[counts] = run(self._load, self._seed, counts)
        return self._runs[counts]

    def best(self, num_replicas: int, share: float) -> tuple[int, int]:
        """Return the best split of so many replicas, searched from this share of prefill upward and downward
        until goodput falls."""

        def num_good(num_prefill: int) -> int:
            return self.run(num_prefill, num_replicas - num_prefill).num_good

        best = min(max(1, round(share * num_replicas)), num_replicas - 1)
        for step in (1, -1):
            other = best + step
            while 1 <= other < num_replicas and num_good(other) > num_good(best):
                best, other = other, other + step
        return best, num_replicas - best

    def attainable(self, num_replicas: int) -> float:
        """Return the goodput of the best split of so many replicas for each half, over that of the best split
        for both."""
        halves: list[tuple[int, int]] = []
        for num_prefill in range(1, num_replicas):
            result = self.run(num_prefill, num_replicas - num_prefill).simulated.result
            late = [it.arrived_at >= SPAN_S / 2 for it in result.records if self._load.objectives.kept_by(it)]
            halves.append((late.count(False), late.count(True)))
        best_of_each = max(early for early, _ in halves) + max(late for _, late in halves)
        return best_of_each / max(early + late for early, late in halves)

    def good_at(self, mean_replicas: float, share: float) -> float:
        """Return the goodput of the best splits of so many replicas, between two whole numbers in
        proportion."""
        low = max(2, math.floor(mean_replicas))
        few, many = (self.run(*self.best(number, share)).num_good for number in (low, low + 1))
        return few + (mean_replicas - low) * (many - few)


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


def scaling_of(load: Load, policy: Policy = decide, **settings: Any) -> PlannedScaling:
    """Return autoscaling of both pools for the objectives of the load, with the default settings but
    these."""
    limits = PoolLimits(min=1, max=MOST)
    config = ScalingConfig(
        autoscale=True,
        pools={"prefill": limits, "decode": limits},
        ttft_slo_s=load.objectives.ttft_s,
        itl_slo_s=load.objectives.tpot_s,
        **settings,
    )
    return PlannedScaling(config, ReplicaTimes(START_S), policy)


def judge_seed(load: Load, seed: int, scaling: PlannedScaling, *, has_moves: bool) -> float:
    """Return the goodput of a policy over that of the best static splits of as many replica-hours."""
    splits = StaticSplits(load, seed)
    counts = load.counts
    if load.begins_best:
        counts = splits.best(sum(counts), counts[0] / sum(counts))
    ours = run(load, seed, counts, scaling)
    if has_moves:
        for move in ours.simulated.moves:
            show(at=round(move.at), pool=move.pool, before=move.before, after=move.after, why=move.reason)
    static = splits.good_at(ours.mean_replicas, prefill_share(counts, ours.simulated))
    ratio = ours.num_good / static
    attainable = {}
    if load.has_halves:
        attainable["attainable"] = round(splits.attainable(round(ours.mean_replicas)), 4)
    show(
        load=load.name,
        seed=seed,
        scheme=_scheme(scaling),
        mean_replicas=round(ours.mean_replicas, 2),
        ratio=round(ratio, 4),
        **attainable,
    )
    return ratio


def judge(load: Load, seeds: Sequence[int], scaling: PlannedScaling, *, has_moves: bool) -> bool:
    """Compare a policy with static splits; return whether it keeps the limit in the mean of the seeds."""
    ratios = [judge_seed(load, seed, scaling, has_moves=has_moves) for seed in seeds]
    mean = sum(ratios) / len(ratios)
    show(
        figure=f"{_scheme(scaling)} over static goodput, {load.name}",
        limit=load.least_ratio,
        value=round(mean, 4),
        ratio=round(mean / load.least_ratio, 4),
        seeds=len(ratios),
        least=round(min(ratios), 4),
        most=round(max(ratios), 4),
    )
    return mean >= load.least_ratio


def show(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=NUM_TRACED)
    parser.add_argument("--loads", default="public,diurnal,shift,swap")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--change-roles", action="store_true", help="replicas may play the other role")
    parser.add_argument("--queue-target", action="store_true", help="run that policy, too")
    parser.add_argument("--moves", action="store_true", help="show each move with its reason")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    kept = []
    for load in loads(arguments.loads.split(","), arguments.trace, arguments.requests):
        scaling = scaling_of(
            load, change_roles=arguments.change_roles, role_change_after_s=ROLE_CHANGE_AFTER_S
        )
        kept.append(judge(load, seeds, scaling, has_moves=arguments.moves))
        if arguments.queue_target:
            plain = scaling_of(load, QueueTarget(PREFILL_TARGET, DECODE_TARGET))
            judge(load, seeds, plain, has_moves=arguments.moves)
    raise SystemExit(not all(kept))


if __name__ == "__main__":
    main()
