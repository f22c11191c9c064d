"""How long a simulation takes, and how much memory, as JSON lines.

Replicas of Llama 3.3 70B on four H100 serve prompts of 12,000 tokens and answers of 340 in the mean, as the
conversations of Mooncake's public trace have them, at a share of the rate that they hold within 10 s and 50
ms where chunks of prompts are as long as they may be. An hour of 100 replicas at 60 % is to take less than
15 minutes and 8 GiB.

    python -m benchmarks.simulation_speed [--replicas 100] [--seconds 3600] [--load 0.6]
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from cluster.planning.device_profile import device_profile
from cluster.planning.device_split import DeviceSplit
from cluster.planning.planned_model import planned_model
from cluster.simulation.planned_engine import planned_engine
from cluster.simulation.run_simulation import SimulationPlan, run_simulation
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import DrawnLengths, drawn_sessions
from cluster.simulation.simulation_result import SimulatedObjectives

MODEL, DEVICE, SPLIT = "llama-3.3-70b", "H100", DeviceSplit(4)
LENGTHS = DrawnLengths(12_000, 340)
OBJECTIVES = SimulatedObjectives(ttft_s=10.0, tpot_s=0.05)
# The requests a second of a replica whose steps alternate: prompts keep it busy for 0.84 s each, and in the
# rest of the time 11 sequences share each of the 340 steps of 21 ms that an answer takes.
CAPACITY = 0.6867
MAX_SEQUENCES = 256
LIMIT_REPLICA_S, LIMIT_S, LIMIT_GIB = 360_000.0, 900.0, 8.0


def measure(num_replicas: int, seconds: float, load: float) -> dict[str, object]:
    """Simulate so many replicas for so long."""
    model, profile = planned_model(MODEL, "auto", "auto"), device_profile(DEVICE)
    rate = load * num_replicas * CAPACITY
    engine = planned_engine(model, profile, SPLIT, MAX_SEQUENCES)
    plan = SimulationPlan(
        ClusterShape([("both", engine)] * num_replicas),
        drawn_sessions(LENGTHS, rate, round(rate * seconds), 1),
        OBJECTIVES,
    )
    started_at, started_cpu = time.perf_counter(), time.process_time()
    done = run_simulation(plan)
    wall_s, cpu_s = time.perf_counter() - started_at, time.process_time() - started_cpu
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    # The limits are for an hour of 100 replicas, and grow with both.
    limit_s = LIMIT_S * num_replicas * seconds / LIMIT_REPLICA_S
    found = done.result.as_json()
    return {
        "what": "simulation_speed",
        "replicas": num_replicas,
        "simulated_s": round(done.result.span_s, 1),
        "rate": round(rate, 3),
        "requests": found["requests"],
        "steps": sum(use.num_steps for use in done.result.replicas),
        "utilization": found["utilization"],
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "limit_s": round(limit_s, 1),
        "ratio": round(cpu_s / limit_s, 3),
        "gib": round(gib, 2),
        "limit_gib": LIMIT_GIB,
        "times_real": round(num_replicas * done.result.span_s / cpu_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--load", type=float, default=0.6)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.replicas, arguments.seconds, arguments.load)), flush=True)


if __name__ == "__main__":
    main()
