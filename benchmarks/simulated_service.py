"""How well the simulator predicts a real cluster on this machine, as JSON lines.

A cluster of one prefill and one decode replica and a store in host memory is started by `tandem serve`. Its
capacity is measured with requests at once. What the replicas have then measured of their steps and of the
store, and what requests that come one by one take beside, is all that the simulator is given.

Then requests of other lengths arrive at random (Poisson) at 0.4, 0.7 and 0.9 of the capacity, three times
each, and the same requests at the same times are simulated. Of one more load the prompts begin with one of
`NUM_PREFIXES` prefixes, which are more than the devices keep: many come back from the store. The median time
to the first token and the output tokens a second are to agree within 15 %, the 99th percentile within 30 %,
or within the spread of the real runs where that is larger.

The ranks compute a drawn model of 85 million weights, each with one thread, on the cores that the gateway,
the engine cores and the client use too. With `--paced` they compute the bundled model and sleep for a time of
each step (`debug.pace`), so that nothing competes. With `--tpot-objective` (seconds) engines size the chunks
of prompts by it, and the router prices prompts at the decode replica accordingly.

    python -m benchmarks.simulated_service [--paced] [--seconds 30] [--shares 0.4,0.7,0.9] [--returning 0.7]
                                           [--runs 3] [--tpot-objective SECONDS]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from benchmarks.overload_cluster import CLUSTER
from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.served import ROOT, Service, serving
from cluster.api.admin_client import AdminClient
from cluster.bench.grpc_target import grpc_target
from cluster.bench.live_engines import read_live
from cluster.bench.served_call import ServedCall
from cluster.bench.serving_figures import ServedRequest
from cluster.bench.serving_load import Workload, run_sessions
from cluster.bench.targets import Target
from cluster.cli.gateway_options import CallerOptions
from cluster.simulation.run_simulation import SimulationPlan, run_simulation
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import SimulatedSession, SimulatedTurn
from cluster.simulation.simulation_result import SimulatedObjectives
from cluster.simulation.store_shape import StoreShape
from kvtransfer.common.clock import SystemClock

CONCURRENCY, CAPACITY_REQUESTS = 12, 40
# The requests that come one by one.
NUM_SINGLE = 8
MEDIAN_LIMIT, TAIL_LIMIT = 0.15, 0.30
# The least share of the tokens of returning prompts that has to come from the store, really and simulated.
LEAST_LOADED = 0.1
OBJECTIVES = SimulatedObjectives(1e6, 1e6)
DRAM_GB = 0.5
# The KV of a replica is less than the prefixes that come back.
KV_TOKENS = {"prefill": 2048, "decode": 4096}
NUM_PREFIXES = 40
# The rate at which these come first, when nothing of them is found, as a share of the capacity.
FIRST_SHARE = 0.8
MODEL: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


class Lengths(NamedTuple):
    """Tokens of a prompt, and how many of them are those of a prefix where prefixes return, and tokens of its
    answer."""

    input: int
    prefix: int
    output: int


# The capacity is that of other lengths than those of the loads. What is not found of a prompt fits a step of
# paced ranks beside all sequences that decode: these add the time of a step to that of its chunks, where
# computing ranks take the longer of the two, and short chunks would be learned as slow attention.
PACED_BATCH_TOKENS = 80
CAPACITY, LOAD = Lengths(128, 64, 16), Lengths(192, 128, 24)
# Some longer prompts come first: those of one length do not tell a token from its attention to others.
LONG, NUM_LONG = Lengths(320, 0, 16), 24


@dataclass(frozen=True, slots=True)
class ReturningPrefixes(Workload):
    """Each of `num_groups` prefixes comes once; behind these, prompts begin with one that is drawn."""

    def prompts(self) -> list[list[int]]:
        generator = np.random.default_rng(self.seed)
        prefixes = generator.integers(0, self.vocab_size, (self.num_groups, self.shared_prefix_tokens))
        num_own = self.input_tokens - self.shared_prefix_tokens
        own = generator.integers(0, self.vocab_size, (self.num_requests, num_own))
        again = generator.integers(0, self.num_groups, self.num_requests - self.num_groups)
        order = [*range(self.num_groups), *again.tolist()]
        return [[*prefixes[group].tolist(), *row.tolist()] for group, row in zip(order, own, strict=True)]


def workload(lengths: Lengths, num_requests: int, seed: int, *, returning: bool) -> Workload:
    """Return requests of these lengths, as many at once as the capacity takes."""
    kind = ReturningPrefixes if returning else Workload
    return kind(
        num_requests=num_requests + (NUM_PREFIXES if returning else 0),
        concurrency=CONCURRENCY,
        rate_per_s=0.0,
        input_tokens=lengths.input,
        output_tokens=lengths.output,
        shared_prefix_tokens=lengths.prefix if returning else 0,
        num_groups=NUM_PREFIXES if returning else 1,
        seed=seed,
        vocab_size=4000,
        num_after=num_requests if returning else 0,
    )


def cluster_file(folder: Path, *, is_paced: bool, tpot_objective_s: float | None = None) -> Path:
    """Write the cluster's file, and of unpaced ranks the model; return the file."""
    model = ROOT / "models" / "tiny"
    if not is_paced:
        write_random_checkpoint(
            folder / "model", "llama", seed=1, dtype="bfloat16", tokenizer_from=model, **MODEL
        )
        model = folder / "model"
    pools = [
        {
            "name": role,
            "role": role,
            "cpus_per_rank": 0.5,
            "engine": {
                "block_tokens": 16,
                "kv_tokens": kv_tokens,
                "max_sequences": 16,
                "max_batch_tokens": PACED_BATCH_TOKENS if is_paced else 256,
                "tpot_objective_s": tpot_objective_s,
            },
        }
        for role, kv_tokens in KV_TOKENS.items()
    ]
    settings: dict[str, Any] = {
        "model": str(model),
        "pools": pools,
        "store": {"dram_gb": DRAM_GB, "index": False},
    }
    if is_paced:
        settings["debug"] = CLUSTER["debug"]
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


class StoreUse(NamedTuple):
    """The rate at which replicas load KV from host memory, in bytes a second (None: nothing was loaded), and
    the tokens that they have loaded."""

    bytes_s: float | None
    num_tokens: int


async def store_use(admin_address: str) -> StoreUse:
    """Return what all replicas have loaded so far."""
    async with AdminClient(admin_address) as client:
        loads = [replica.load for replica in (await client.status()).replicas]
    rates = [
        load.load_tok_s["dram"] * sum(load.layers_token_bytes.values())
        for load in loads
        if "dram" in load.load_tok_s
    ]
    return StoreUse(max(rates, default=None), sum(load.num_loaded_tokens.get("dram", 0) for load in loads))


async def run_load(target: Target, load: Workload) -> list[ServedRequest]:
    """Send a load to the real cluster."""
    return list(
        await run_sessions(load.sessions(), load.concurrency, target.send, SystemClock(), lambda _: None)
    )


def simulate(shape: ClusterShape, load: Workload) -> tuple[list[ServedRequest], int]:
    """Send the same load to a simulation of the cluster. Returns its requests, and the tokens of prompts that
    came from the store."""

    def sessions() -> Iterator[SimulatedSession]:
        for prompt, at_s in zip(load.prompts(), load.arrivals_s(), strict=True):
            new = np.asarray(prompt, dtype=np.uint32)
            yield SimulatedSession(at_s, (SimulatedTurn(lambda new=new: new, load.output_tokens),))  # type: ignore[misc]

    done = run_simulation(SimulationPlan(shape, sessions(), OBJECTIVES))
    num_loaded = sum(use.tier_to_found.get("dram", 0) for use in done.result.replicas)
    return [ServedCall(record) for record in done.result.records], num_loaded


def median(shares: Sequence[float]) -> float:
    """Return the median of shares."""
    return round(float(np.median(shares)), 3)


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


def compared(real: list[dict[str, float]], simulated: list[dict[str, float]]) -> dict[str, Any]:
    """Return the values of one load: medians over the runs, and whether their ratio is within its limit."""
    line: dict[str, Any] = {}
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


class Runs(NamedTuple):
    """The runs of one load: the compared values of each, and the shares of the tokens of prompts that were
    found and that were loaded from the store."""

    values: list[dict[str, float]]
    found: list[float]
    loaded: list[float]

    def add(self, requests: Sequence[ServedRequest], loaded_share: float) -> None:
        """Add a run."""
        self.values.append(values_of(requests))
        self.found.append(sum(it.num_cached for it in requests) / sum(it.num_input for it in requests))
        self.loaded.append(loaded_share)


class Capacity(NamedTuple):
    """What the cluster gets done, in requests of the loads a second."""

    fresh: float
    returning: float

    def of(self, *, returning: bool) -> float:
        return self.returning if returning else self.fresh


class Comparison:
    """Loads on a real cluster beside their simulation."""

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._target = target

    async def capacity(self) -> Capacity:
        """Measure how many requests of each kind get done, after some of another length."""
        per_s = []
        await run_load(self._target, workload(LONG, NUM_LONG, 6, returning=False))
        for returning in (False, True):
            for seed in (7, 8):  # the first load warms the cluster up
                load = workload(CAPACITY, CAPACITY_REQUESTS, seed, returning=returning)
                requests = await run_load(self._target, load)
            measured = requests[NUM_PREFIXES if returning else 0 :]
            span_s = max(it.finished_at for it in measured) - min(it.sent_at for it in measured)
            work = [it.input - it.prefix * returning + it.output for it in (CAPACITY, LOAD)]
            per_s.append(work[0] / work[1] * len(measured) / span_s)
        return Capacity(*per_s)

    async def request_s(self, shape: ClusterShape) -> float:
        """Measure what requests that come one by one take until their first token beside what the simulation
        of the shape takes, in the median."""
        load = workload(CAPACITY, NUM_SINGLE, 9, returning=False)
        requests = await run_load(self._target, replace(load, concurrency=1))
        # Far enough apart that each finds the cluster idle.
        simulated, _ = simulate(shape, replace(load, rate_per_s=0.01))
        real_s, simulated_s = (float(np.median([it.ttft_s for it in each])) for each in (requests, simulated))
        return max(0.0, real_s - simulated_s)

    async def compare(
        self, shape: ClusterShape, loads: Sequence[Workload], *, returning: bool
    ) -> dict[str, Any]:
        """Run loads, and return the line that compares them."""
        real, simulated = Runs([], [], []), Runs([], [], [])
        num_first = NUM_PREFIXES if returning else 0
        for load in loads:
            num_tokens = load.num_requests * load.input_tokens
            before = await store_use(self._service.admin_address)
            requests = await run_load(self._target, load)
            after = await store_use(self._service.admin_address)
            real.add(requests[num_first:], (after.num_tokens - before.num_tokens) / num_tokens)
            requests, num_loaded = simulate(shape, load)
            simulated.add(requests[num_first:], num_loaded / num_tokens)
        line = compared(real.values, simulated.values)
        if returning:
            line["found_share"] = [median(real.found), median(simulated.found)]
            line["loaded_share"] = [median(real.loaded), median(simulated.loaded)]
            line["is_kept"] &= min(line["loaded_share"]) >= LEAST_LOADED
        return line


class Plan(NamedTuple):
    """The loads: their shares of the capacity, and the length and number of the runs."""

    shares: Sequence[float]
    returning_shares: Sequence[float]
    seconds: float
    num_runs: int


async def measure(service: Service, plan: Plan) -> bool:
    """Measure the capacity, then each load in turn; return whether all limits were kept."""
    is_kept = True
    async with grpc_target(service.address, 120.0, CallerOptions().credentials()) as target:
        comparison = Comparison(service, target)
        capacity = await comparison.capacity()
        live = await read_live(service.admin_address, 3600.0, CallerOptions())
        use = await store_use(service.admin_address)
        store = StoreShape(int(1e9 * DRAM_GB), shares=False)
        if use.bytes_s is not None:
            store = store._replace(link_bytes_s=use.bytes_s)
        replicas = [(role, engine) for role, each in live.replicas.items() for engine in each]
        shape = ClusterShape(replicas, store=store)
        shape = shape._replace(request_s=await comparison.request_s(shape))
        engines = {role: each[0].steps._asdict() for role, each in live.replicas.items()}
        line = {"what": "capacity", **capacity._asdict(), "request_s": shape.request_s}
        line |= {"steps": engines, "store": store._asdict()}
        print(json.dumps(line), flush=True)
        kinds = [(share, False) for share in plan.shares] + [(share, True) for share in plan.returning_shares]
        for number, (share, returning) in enumerate(kinds):
            rate_s = share * capacity.of(returning=returning)
            loads = [
                # Prompts that neither cluster has seen: the simulated one begins with empty caches.
                replace(
                    workload(
                        LOAD,
                        max(20, round(rate_s * plan.seconds)),
                        100 * (1 + number) + run,
                        returning=returning,
                    ),
                    concurrency=0,
                    rate_per_s=FIRST_SHARE * capacity.fresh if returning else rate_s,
                    rate_after_per_s=rate_s,
                )
                for run in range(plan.num_runs)
            ]
            kind = "returning" if returning else "fresh"
            print(f"{kind} prompts at {share:g} of the capacity", file=sys.stderr, flush=True)
            line = await comparison.compare(shape, loads, returning=returning)
            is_kept &= line["is_kept"]
            head = {"what": "simulated_service", "prompts": kind, "share": share, "runs": plan.num_runs}
            print(json.dumps(head | line), flush=True)
    return is_kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--shares", default="0.4,0.7,0.9")
    parser.add_argument("--returning", default="0.7")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tpot-objective", type=float)
    arguments = parser.parse_args()
    shares, returning = (
        [float(item) for item in text.split(",") if item] for text in (arguments.shares, arguments.returning)
    )
    plan = Plan(shares, returning, arguments.seconds, arguments.runs)
    with tempfile.TemporaryDirectory() as folder:
        file = cluster_file(Path(folder), is_paced=arguments.paced, tpot_objective_s=arguments.tpot_objective)
        with serving("--file", str(file)) as service:
            is_kept = asyncio.run(measure(service, plan))
    sys.exit(not is_kept)


if __name__ == "__main__":
    main()
