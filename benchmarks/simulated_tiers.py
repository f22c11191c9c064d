"""What each tier of the store adds, in a simulated cluster, as JSON lines.

Sixteen replicas, each on a node of its own, compute prompts alone. Per node the device has 300 blocks of 512
tokens, DRAM 500 and NVMe 1,560. The lines compare a device alone, DRAM, records of other nodes, and three
ways to choose what is written to NVMe. Hits are tokens found for each token of a prompt, and writes to NVMe
are bytes for each byte of KV of the prompts.

Requests are chats that come back, or with `--trace FILE` those of a trace in Mooncake's format.

    python -m benchmarks.simulated_tiers [--trace FILE] [--requests 1500]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from cluster.bench.simulated_trace import FileTrace
from cluster.simulation.run_simulation import SimulationPlan, run_simulation
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import (
    SimulatedSession,
    SimulatedTurn,
    prefill_token_s,
    trace_sessions,
)
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.simulation_result import SimulatedObjectives
from cluster.simulation.step_model import StepModel
from cluster.simulation.store_shape import StoreShape, parse_store

NUM_REPLICAS = 16
BLOCK_TOKENS = 512
DEVICE_BLOCKS = 300
UTILIZATION = 0.75
STORES = {
    "device": "",
    "dram": "dram=34,shared=no",
    "dram of all nodes": "dram=34",
    "nvme, seen twice": "dram=34,nvme=105,admission=seen_twice",
    "nvme, adaptive": "dram=34,nvme=105",
    "nvme, all": "dram=34,nvme=105,admission=all",
}
# Chats: tokens that each turn adds, turns, the mean pause between two, and chats a second.
TURN_TOKENS, NUM_TURNS, PAUSE_S, CHATS_S = 4096, 5, 60.0, 1.0


def chats(num_requests: int) -> Iterator[SimulatedSession]:
    """Yield chats that begin at random."""
    source = np.random.default_rng(0)
    starts = accumulate(source.exponential(1 / CHATS_S) for _ in range(num_requests // NUM_TURNS))
    for number, at_s in enumerate(starts):
        pauses_s = [0.0, *source.exponential(PAUSE_S, NUM_TURNS - 1)]
        turns = [
            SimulatedTurn(partial(_question, number, turn), 1, pause_s)
            for turn, pause_s in enumerate(pauses_s)
        ]
        yield SimulatedSession(at_s, turns)


def _question(number: int, turn: int) -> np.ndarray:
    return np.random.default_rng((number, turn)).integers(0, 1 << 30, TURN_TOKENS, dtype=np.uint32)


def measure(name: str, trace: FileTrace | None, num_requests: int) -> dict[str, object]:
    """Return the line of one store."""
    if trace is None:
        mean_tokens = TURN_TOKENS * (NUM_TURNS + 1) / 2
        token_s = UTILIZATION * NUM_REPLICAS / (CHATS_S * NUM_TURNS * mean_tokens)
        sessions = chats(num_requests)
    else:
        token_s = prefill_token_s(trace, NUM_REPLICAS, UTILIZATION)
        sessions = (session.cut(1) for session in trace_sessions(trace))
    steps = StepModel(base_s=0.008, sequence_s=1e-5, context_s=4e-8, token_s=token_s)
    engine = SimulatedEngine(steps, DEVICE_BLOCKS, BLOCK_TOKENS)
    store: StoreShape | None = parse_store(STORES[name], replicas_per_node=1)
    shape = ClusterShape([("both", engine)] * NUM_REPLICAS, holds_back=False, store=store)
    result = run_simulation(SimulationPlan(shape, sessions, SimulatedObjectives(30.0, 1.0))).result
    values, num_tokens = result.as_json(), sum(record.num_prompt for record in result.records)
    return {
        "what": "simulated_tiers",
        "store": name,
        "requests": values["requests"],
        **{f"hits_{tier}": round(share, 4) for tier, share in result.tier_hits.items()},
        "hits": round(sum(result.tier_hits.values()), 4),
        "nvme_writes": round(result.num_written_bytes / (num_tokens * engine.token_bytes), 4),
        "ttft_mean_s": values["ttft_mean_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="a trace of requests in Mooncake's format")
    parser.add_argument("--requests", type=int, default=1500)
    arguments = parser.parse_args()
    trace = None if arguments.trace is None else FileTrace(arguments.trace, arguments.requests, 1.0)
    for name in STORES:
        print(json.dumps(measure(name, trace, arguments.requests)), flush=True)


if __name__ == "__main__":
    main()
