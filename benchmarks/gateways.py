"""How well several gateways share the replicas, in virtual time, as JSON lines.

A simulated cluster (`cluster.simulation`) runs the code that serves. 16 replicas of role "both" compute one
prompt of 2,048 tokens in a step, at 10,000 tokens a second. Requests come at random (Poisson) at 70 % of what
the replicas can do, each to a gateway drawn at random. With `cut`, no frame of placements arrives in the
middle fifth of the run; with `none`, never. With `--admission` what no replica can take waits in its gateway,
as in a cluster; without, all is sent at once. Every figure is the median over the seeds.

    python -m benchmarks.gateways [--requests 50000] [--seeds 5] [--gateways 1,4,8] [--admission]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from typing import Literal, NamedTuple, get_args

import numpy as np

from cluster.simulation.simulated_call import SimulatedRequest
from cluster.simulation.simulated_cluster import ClusterShape, SimulatedCluster
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.step_model import StepModel

NUM_REPLICAS = 16
UTILISATION = 0.7
BLOCK_TOKENS = 64
PROMPT_TOKENS = 2048
TOK_S = 10_000.0
RATE_S = NUM_REPLICAS * UTILISATION * TOK_S / PROMPT_TOKENS
# With shared prefixes: how many there are, and how many blocks each has.
NUM_PREFIXES = 64
PREFIX_BLOCKS = 16
ENGINE = SimulatedEngine(
    StepModel(base_s=0.03, sequence_s=0.0, context_s=0.0, token_s=1 / TOK_S),
    num_blocks=1024,
    block_tokens=BLOCK_TOKENS,
    max_batch_tokens=PROMPT_TOKENS,
    chunk_tokens=PROMPT_TOKENS,
)
# Until then the gateways know all replicas.
BEGINS_S = 1.0
# The time after its end in which the cut exchange may still disturb requests.
RECOVERY_S = 5.0
Exchange = Literal["exchange", "none", "cut"]


class Outcome(NamedTuple):
    """The outcome of one run: seconds from arrival to first token, of all requests, and of those after the
    cut's end, the share of the tokens of prompts that was found, and that of the requests which were sent
    back."""

    mean_s: float
    p99_s: float
    mean_after_s: float
    hit_rate: float
    sent_back: float


class Arrivals:
    """Requests that come at random, to gateways drawn at random."""

    def __init__(self, cluster: SimulatedCluster, seed: int, *, has_prefixes: bool) -> None:
        self._cluster = cluster
        self._source = np.random.default_rng(seed)
        self._has_prefixes = has_prefixes

    def begin(self, num_requests: int) -> None:
        """Let so many requests arrive, the first one now."""
        self._cluster.arrive(self._draw(), gateway=int(self._source.integers(len(self._cluster.gateways))))
        if num_requests > 1:
            gap_s = self._source.exponential(1 / RATE_S)
            self._cluster.events.after(gap_s, lambda: self.begin(num_requests - 1))

    def _draw(self) -> SimulatedRequest:
        prompt = self._source.integers(0, 1 << 30, PROMPT_TOKENS, dtype=np.uint32)
        if self._has_prefixes:
            prefix = int(NUM_PREFIXES * self._source.random() ** 2)
            prompt[: PREFIX_BLOCKS * BLOCK_TOKENS] = prefix
        return SimulatedRequest(prompt.astype("<u4").tobytes(), 1)


def run(
    num_gateways: int,
    num_requests: int,
    seed: int,
    *,
    exchange: Exchange = "exchange",
    has_prefixes: bool = False,
    has_admission: bool = False,
) -> Outcome:
    """Run one cluster; nothing may be left of any request."""
    shape = ClusterShape([("both", ENGINE)] * NUM_REPLICAS, num_gateways, holds_back=has_admission)
    cluster = SimulatedCluster(shape, seed)
    if exchange == "none":
        cluster.placements.cut()
    cluster.events.run(BEGINS_S)
    span_s = num_requests / RATE_S
    if exchange == "cut":
        cluster.events.after(0.4 * span_s, cluster.placements.cut)
        cluster.events.after(0.6 * span_s, cluster.placements.connect)
    Arrivals(cluster, seed, has_prefixes=has_prefixes).begin(num_requests)
    while len(cluster.records) < num_requests or cluster.num_running:
        cluster.events.step()
    cluster.events.run(cluster.clock.now() + 1.0)  # the last frames arrive
    cluster.check()
    records = cluster.records
    assert all(it.is_good for it in records), "none should be refused at this load"
    after_s = BEGINS_S + 0.6 * span_s + RECOVERY_S
    waits_s = [it.ttft_s for it in records]
    return Outcome(
        statistics.fmean(waits_s),
        float(np.quantile(waits_s, 0.99)),
        statistics.fmean([it.ttft_s for it in records if it.arrived_at > after_s] or [0.0]),
        sum(it.num_cached for it in records) / (num_requests * PROMPT_TOKENS),
        sum(it.num_attempts > 1 for it in records) / num_requests,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gateways", default="1,4,8")
    parser.add_argument("--kinds", default="exchange,none,cut")
    parser.add_argument("--admission", action="store_true")
    arguments = parser.parse_args()
    # Nothing of a request is in a cycle, and looking for cycles among all blocks takes long.
    gc.disable()
    for has_prefixes in (False, True):
        base: Outcome | None = None
        for num_gateways in map(int, arguments.gateways.split(",")):
            kinds = arguments.kinds.split(",") if num_gateways > 1 else ["exchange"]
            for kind in (it for it in get_args(Exchange) if it in kinds):
                outcomes = [
                    run(
                        num_gateways,
                        arguments.requests,
                        seed,
                        exchange=kind,
                        has_prefixes=has_prefixes,
                        has_admission=arguments.admission,
                    )
                    for seed in range(arguments.seeds)
                ]
                median = Outcome(*(statistics.median(values) for values in zip(*outcomes, strict=True)))
                base = base or median
                line = {
                    "what": "gateways",
                    "gateways": num_gateways,
                    "exchange": kind,
                    "admission": arguments.admission,
                    "shared_prefixes": has_prefixes,
                    "requests": arguments.requests,
                    "mean_ms": round(1e3 * median.mean_s, 1),
                    "p99_ms": round(1e3 * median.p99_s, 1),
                    "mean_after_cut_ms": round(1e3 * median.mean_after_s, 1),
                    "token_hit_rate": round(median.hit_rate, 3),
                    "sent_back": round(median.sent_back, 4),
                    "mean_ratio": round(median.mean_s / base.mean_s, 3),
                    "p99_ratio": round(median.p99_s / base.p99_s, 3),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
