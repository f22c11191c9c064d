"""How well replicas of unlike speed share the load, in virtual time, as JSON lines.

Four replicas compute 40,000 tokens a second and four 8,000, one prompt of 2,048 tokens in a step. Requests
arrive at random (Poisson) at 30, 50 and 70 % of what they can do together. A simulated cluster, whose gateway
routes each as it comes, is beside the shortest expected time: whoever would be done first, known exactly.
Every figure is the mean over the seeds of the mean time from arrival to first token, without the network.

    python -m benchmarks.unlike_replicas [--requests 20000] [--seeds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np

from cluster.simulation.run_simulation import SimulationPlan, run_simulation
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import SimulatedSession, SimulatedTurn, drawn_prompt
from cluster.simulation.simulated_peers import NETWORK_S
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.simulation_result import SimulatedObjectives
from cluster.simulation.step_model import StepModel

SPEEDS_TOK_S = (40_000.0,) * 4 + (8_000.0,) * 4
PROMPT_TOKENS = 2048
LOADS = (0.3, 0.5, 0.7)


def engine(tok_s: float) -> SimulatedEngine:
    """Return a replica that computes one prompt in a step."""
    steps = StepModel(base_s=0.03, sequence_s=0.0, context_s=0.0, token_s=1 / tok_s)
    return SimulatedEngine(steps, num_blocks=4096, max_batch_tokens=PROMPT_TOKENS, chunk_tokens=PROMPT_TOKENS)


def routed_s(arrivals_s: Sequence[float], seed: int) -> float:
    """Return the mean time to the first token where the router chooses."""
    shape = ClusterShape([("both", engine(tok_s)) for tok_s in SPEEDS_TOK_S], holds_back=False)
    sessions = (
        SimulatedSession(at_s, (SimulatedTurn(partial(drawn_prompt, number, PROMPT_TOKENS), 1),))
        for number, at_s in enumerate(arrivals_s)
    )
    result = run_simulation(SimulationPlan(shape, sessions, SimulatedObjectives(1e6, 1e6), seed)).result
    # The two ways over the network are the same for every choice, and left out.
    return statistics.fmean(record.ttft_s - 2 * NETWORK_S for record in result.records)


def shortest_expected_s(arrivals_s: Sequence[float]) -> float:
    """Return the mean time to the first token where each request goes to who is done with it first."""
    free_at = [0.0] * len(SPEEDS_TOK_S)
    times_s = []
    for at_s in arrivals_s:
        done_at, index = min(
            (max(at_s, free_at[index]) + PROMPT_TOKENS / tok_s, index)
            for index, tok_s in enumerate(SPEEDS_TOK_S)
        )
        free_at[index] = done_at
        times_s.append(done_at - at_s)
    return statistics.fmean(times_s)


def measure(load: float, num_requests: int, num_seeds: int) -> dict[str, object]:
    """Return the line of one load."""
    rate_s = load * sum(SPEEDS_TOK_S) / PROMPT_TOKENS
    seeds = range(num_seeds)
    gaps_s = [np.random.default_rng(seed).exponential(1 / rate_s, num_requests) for seed in seeds]
    arrivals_s: list[list[float]] = [np.cumsum(gaps).tolist() for gaps in gaps_s]
    shortest_s = statistics.fmean(map(shortest_expected_s, arrivals_s))
    router_s = statistics.fmean(map(routed_s, arrivals_s, seeds))
    return {
        "what": "unlike_replicas",
        "load": load,
        "shortest_expected_time_ms": round(1e3 * shortest_s, 1),
        "router_ms": round(1e3 * router_s, 1),
        "ratio": round(router_s / shortest_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    for load in LOADS:
        print(json.dumps(measure(load, arguments.requests, arguments.seeds)), flush=True)


if __name__ == "__main__":
    main()
