"""Small simulated clusters and loads, for tests."""

from __future__ import annotations

import random

import numpy as np

from cluster.simulation.simulated_call import CallRecord, SimulatedRequest
from cluster.simulation.simulated_cluster import ClusterShape, SimulatedCluster
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.step_model import StepModel
from kvtransfer.request_facts import ServiceClass

# A step of one sequence takes 6 ms, a prompt of 1,000 tokens 22 ms.
STEPS = StepModel(base_s=0.006, sequence_s=1e-5, context_s=4e-8, token_s=2.2e-5, attention_s=2.5e-10)
ENGINE = SimulatedEngine(STEPS, num_blocks=2000, block_tokens=64, max_sequences=32)

Log = list[tuple[object, ...]]


def tokens(source: random.Random, num_tokens: int, num_shared: int = 0) -> bytes:
    """Draw a prompt, whose first `num_shared` tokens are those of all others."""
    own = np.random.default_rng(source.getrandbits(32)).integers(0, 1 << 30, num_tokens, dtype=np.uint32)
    own[:num_shared] = np.arange(min(num_shared, num_tokens), dtype=np.uint32)
    return own.astype("<u4").tobytes()


def offer(
    cluster: SimulatedCluster,
    rate_s: float,
    until_s: float,
    seed: int,
    *,
    mean_input: int = 600,
    mean_output: int = 60,
    classes: tuple[ServiceClass, ...] = ("standard",),
) -> None:
    """Let requests of drawn lengths arrive at random until then."""
    source = random.Random(seed)

    def arrive() -> None:
        if cluster.clock.now() >= until_s:
            return
        num_input = 1 + int(mean_input * source.expovariate(1.0))
        num_output = 1 + int(mean_output * source.expovariate(1.0))
        prompt = tokens(source, min(num_input, 20 * mean_input), source.choice((0, 256)))
        cluster.arrive(SimulatedRequest(prompt, num_output, "tenant", source.choice(classes)))
        cluster.events.after(source.expovariate(rate_s), arrive)

    cluster.events.after(source.expovariate(rate_s), arrive)


def log_of(records: list[CallRecord]) -> Log:
    """Return what happened to each request, and when."""
    return [
        (
            record.number,
            record.gateway,
            record.arrived_at,
            record.first_token_at,
            record.ended_at,
            record.prefill,
            record.decode,
            record.num_cached,
            record.num_attempts,
            record.num_moves,
            record.error,
        )
        for record in records
    ]


def simulated_cluster(shape: ClusterShape, seed: int = 1) -> SimulatedCluster:
    """Return a cluster whose gateways know all replicas."""
    cluster = SimulatedCluster(shape, seed)
    cluster.events.run(1.0)
    return cluster


def settled(cluster: SimulatedCluster, until_s: float = 12.0) -> list[CallRecord]:
    """Let requests arrive until then, let the cluster finish, check that nothing is left, and return what
    became of its requests."""
    cluster.events.run(until_s)
    cluster.finish(3600.0)
    cluster.events.run(cluster.clock.now() + 5.0)
    cluster.check()
    return cluster.records
