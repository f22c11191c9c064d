"""The autoscaling policy over a made-up hour, as JSON lines: from 1 to 17 requests a second and back, two
bursts of twice that, prompts and outputs of log-normal length (squared variation of prompts 1.9). Beside it
the counts fixed at the policy's mean and at its peak, and a queue target for each pool by itself. Simulated.

    python -m benchmarks.scaling [--seed N]
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np

from cluster.bench.scaling_bench import compare, scaling_json
from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.measured_rates import StepCost
from cluster.scaling.simulation import Arrival, ServiceModel

LENGTH_S = 3600.0
MOST_PER_S = 40.0
BURSTS_S = ((1200.0, 1260.0), (2500.0, 2530.0))
MODEL = ServiceModel(20_000.0, StepCost(0.012, 0.0003), 400_000, 64, 64, start_s=45.0)
LIMITS = PoolLimits(min=1, max=40)


def rate(at: float) -> float:
    """Return the requests a second."""
    smooth = 9 - 8 * math.cos(2 * math.pi * at / LENGTH_S)
    return smooth * (2 if any(start <= at < end for start, end in BURSTS_S) else 1)


def hour(seed: int) -> list[Arrival]:
    generator = np.random.default_rng(seed)
    arrivals, at = [], 0.0
    while (at := at + generator.exponential(1 / MOST_PER_S)) < LENGTH_S:
        if generator.random() < rate(at) / MOST_PER_S:
            prompt = np.clip(generator.lognormal(math.log(2500), 1.1), 50, 60_000)
            output = np.clip(generator.lognormal(math.log(200), 0.8), 5, 3000)
            arrivals.append(Arrival(at, int(prompt), int(output)))
    return arrivals


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    config = ScalingConfig(
        autoscale=True,
        pools={"prefill": LIMITS, "decode": LIMITS},
        ttft_slo_s=2.0,
        itl_slo_s=0.05,
        down_cool_down_s=120.0,
    )
    runs = compare(hour(arguments.seed), MODEL, config, LIMITS)
    base_s = runs[0][1].total_replica_s
    for name, run in runs:
        ratio = round(run.total_replica_s / base_s, 2)
        print(json.dumps({**scaling_json(name, run), "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main()
