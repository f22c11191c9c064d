"""How well the simulator predicts a real cluster on this machine, as JSON lines.

A cluster of one prefill and one decode replica serves the bundled model by `tandem serve`. Its capacity is
measured with requests of one kind at once, and what the replicas have then measured of their steps is all
that the simulator is given. Then requests of other lengths arrive at random (Poisson) at 0.4, 0.7 and 0.9 of
the capacity, three times each, and the same requests at the same times are simulated. The median time to the
first token and the output tokens a second are to agree within 15 %, the 99th percentile within 30 %, or
within the spread of the real runs where that is larger.

With `--paced` ranks sleep for a time of each step (`debug.pace`), so that two replicas, the gateway and the
client do not share two cores.

    python -m benchmarks.simulated_service [--paced] [--seconds 30] [--shares 0.4,0.7,0.9] [--runs 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.overload_cluster import CLUSTER, LOAD
from benchmarks.served import ROOT, Service, serving
from cluster.bench.grpc_target import grpc_target
from cluster.bench.live_engines import LiveCluster, read_live
from cluster.bench.served_call import ServedCall
from cluster.bench.serving_figures import ServedRequest
from cluster.bench.serving_load import Workload, run_sessions
from cluster.bench.targets import Target
from cluster.cli.gateway_options import CallerOptions
from cluster.simulation.run_simulation import SimulationPlan, run_simulation
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import SimulatedSession, SimulatedTurn
from cluster.simulation.simulation_result import SimulatedObjectives
from kvtransfer.common.clock import SystemClock

CONCURRENCY, CAPACITY_REQUESTS = 12, 60
# Other lengths than those of the capacity.
INPUT_TOKENS, OUTPUT_TOKENS = 192, 24
MEDIAN_LIMIT, TAIL_LIMIT = 0.15, 0.30
OBJECTIVES = SimulatedObjectives(1e6, 1e6)
ENGINE = {"block_tokens": 16, "kv_tokens": 16384, "max_sequences": 16}


def cluster_file(folder: Path, *, is_paced: bool) -> Path:
    """Write the cluster's file, and return it."""
    if is_paced:
        settings: dict[str, Any] = {name: CLUSTER[name] for name in ("model", "pools", "debug")}
    else:
        pools = [
            {"name": role, "role": role, "cpus_per_rank": 0.5, "engine": ENGINE}
            for role in ("prefill", "decode")
        ]
        settings = {"model": str(ROOT / "models" / "tiny"), "pools": pools}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


async def run_load(target: Target, workload: Workload) -> list[ServedRequest]:
    """Send a load to the real cluster."""
    return list(
        await run_sessions(
            workload.sessions(), workload.concurrency, target.send, SystemClock(), lambda _: None
        )
    )


def simulate(live: LiveCluster, workload: Workload) -> list[ServedRequest]:
    """Send the same load to a simulation of the cluster."""

    def sessions() -> Iterator[SimulatedSession]:
        for prompt, at_s in zip(workload.prompts(), workload.arrivals_s(), strict=True):
            new = np.asarray(prompt, dtype=np.uint32)
            yield SimulatedSession(at_s, (SimulatedTurn(lambda new=new: new, workload.output_tokens),))  # type: ignore[misc]

    shape = ClusterShape([(role, engine) for role, each in live.replicas.items() for engine in each])
    done = run_simulation(SimulationPlan(shape, sessions(), OBJECTIVES))
    return [ServedCall(record) for record in done.result.records]


def values_of(requests: Sequence[ServedRequest]) -> dict[str, float]:
    """Return the compared values of one run."""
    good = [it for it in requests if it.outcome == "ok"]
    ttfts = [it.ttft_s for it in good]
    span_s = max(it.finished_at for it in requests) - min(it.sent_at for it in requests)
    return {
        "ttft_p50_ms": 1e3 * float(np.quantile(ttfts, 0.5)),
        "ttft_p99_ms": 1e3 * float(np.quantile(ttfts, 0.99)),
        "output_tok_s": sum(it.num_output for it in good) / span_s,
    }


def compared(share: float, real: list[dict[str, float]], simulated: list[dict[str, float]]) -> dict[str, Any]:
    """Return the line of one load: medians over the runs, their ratio, and whether that is within limits."""
    line: dict[str, Any] = {"what": "simulated_service", "share": share, "runs": len(real)}
    is_kept = True
    for name in real[0]:
        seen, told = [run[name] for run in real], [run[name] for run in simulated]
        ratio = float(np.median(told) / np.median(seen))
        limit = TAIL_LIMIT if "p99" in name else MEDIAN_LIMIT
        spread = (max(seen) - min(seen)) / float(np.median(seen))
        is_within = abs(ratio - 1) <= max(limit, spread)
        is_kept &= is_within
        line[name] = {
            "real": [round(it, 2) for it in sorted(seen)],
            "simulated": round(float(np.median(told)), 2),
            "ratio": round(ratio, 3),
            "limit": round(max(limit, spread), 3),
            "is_within": is_within,
        }
    return line | {"is_kept": is_kept}


async def measure(service: Service, seconds: float, shares: Sequence[float], num_runs: int) -> bool:
    """Measure the capacity, then each load in turn; return whether all limits were kept."""
    is_kept = True
    async with grpc_target(service.address, 120.0, CallerOptions().credentials()) as target:
        full = replace(LOAD, num_requests=CAPACITY_REQUESTS, concurrency=CONCURRENCY, service_classes=("",))
        await run_load(target, full)
        done = await run_load(target, replace(full, seed=full.seed + 1))
        span_s = max(it.finished_at for it in done) - min(it.sent_at for it in done)
        work = (LOAD.input_tokens + LOAD.output_tokens) / (INPUT_TOKENS + OUTPUT_TOKENS)
        capacity = work * len(done) / span_s
        live = await read_live(service.admin_address, 3600.0, CallerOptions())
        engines = {role: each[0].steps._asdict() for role, each in live.replicas.items()}
        print(json.dumps({"what": "capacity", "requests_per_s": capacity, "steps": engines}), flush=True)
        for number, share in enumerate(shares):
            real, simulated = [], []
            for run in range(num_runs):
                workload = replace(
                    full,
                    num_requests=max(20, round(share * capacity * seconds)),
                    concurrency=0,
                    rate_per_s=share * capacity,
                    input_tokens=INPUT_TOKENS,
                    output_tokens=OUTPUT_TOKENS,
                    # Prompts that neither cluster has seen: the simulated one begins with an empty cache.
                    seed=100 * (1 + number) + run,
                )
                print(f"{share:g} of capacity, run {run + 1}", file=sys.stderr, flush=True)
                real.append(values_of(await run_load(target, workload)))
                simulated.append(values_of(simulate(live, workload)))
            line = compared(share, real, simulated)
            is_kept &= line["is_kept"]
            print(json.dumps(line), flush=True)
    return is_kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--shares", default="0.4,0.7,0.9")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    shares = [float(item) for item in arguments.shares.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        file = cluster_file(Path(folder), is_paced=arguments.paced)
        with serving("--file", str(file)) as service:
            is_kept = asyncio.run(measure(service, arguments.seconds, shares, arguments.runs))
    sys.exit(not is_kept)


if __name__ == "__main__":
    main()
