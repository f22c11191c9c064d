"""Histories and arrivals for the tests of the autoscaling policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from cluster.metrics.gateway_counters import Demand
from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.policy import ScalingPlan, decide, history_span_s
from cluster.scaling.samples import History, PoolView, ReplicaSample, ScalingSample
from cluster.scaling.simulation import Arrival

PREFILL_TOK_S = 8000.0
STEP_S = 0.02
TOTAL_BLOCKS = 1000


def config(most: int = 16, **settings: Any) -> ScalingConfig:
    """Both pools from 1 to `most`, looked at every 2 s."""
    limits = {"min": 1, "max": most}
    defaults: dict[str, Any] = {
        "autoscale": True,
        "pools": {"prefill": limits, "decode": limits, "both": limits},
        "ttft_slo_s": 2.0,
        "itl_slo_s": 0.05,
    }
    return ScalingConfig.model_validate(defaults | settings)


def pool(role: str, desired: int = 1, **fields: Any) -> PoolView:
    """Named like its role, with limits 1 to 16."""
    view = PoolView(role, role, desired, max_sequences=64, block_tokens=64, limits=PoolLimits(min=1, max=16))
    return view._replace(**fields)


def prefilling(number: int = 0, **load: Any) -> ReplicaSample:
    """A prefill replica at rest, whose rate is known."""
    replica = ReplicaSample(
        replica_id=f"prefill-{number}",
        pool="prefill",
        role="prefill",
        num_free_blocks=TOTAL_BLOCKS,
        num_total_blocks=TOTAL_BLOCKS,
        prefill_tok_s=PREFILL_TOK_S,
    )
    return msgspec.structs.replace(replica, **load)


def decoding(number: int = 0, **load: Any) -> ReplicaSample:
    """A decode replica at rest, whose step time is known."""
    replica = ReplicaSample(
        replica_id=f"decode-{number}",
        pool="decode",
        role="decode",
        num_free_blocks=TOTAL_BLOCKS,
        num_total_blocks=TOTAL_BLOCKS,
        decode_step_s=STEP_S,
    )
    return msgspec.structs.replace(replica, **load)


def demand(arrived: int, prompt_tokens: int = 2000, output_tokens: int = 200) -> Demand:
    """So many requests of one size came, and as many ended, all in time."""
    return Demand(
        num_arrived=arrived,
        num_sequences=arrived,
        num_prompts=arrived,
        num_computed_tokens=arrived * prompt_tokens,
        computed_tokens_squared=float(arrived * prompt_tokens**2),
        num_ended=arrived,
        num_output_tokens=arrived * output_tokens,
        output_tokens_squared=float(arrived * output_tokens**2),
        num_first_tokens=arrived,
        num_gaps=arrived * (output_tokens - 1),
    )


def history_of(
    settings: ScalingConfig,
    sample_of: Callable[[float], tuple[Sequence[ReplicaSample], Demand]],
    seconds: float = 400.0,
    desired: dict[str, int] | None = None,
) -> History:
    """A sample every `interval_s` from time 0 to `seconds`; `desired` is what was asked for all the time."""
    history = History(history_span_s(settings))
    for index in range(int(seconds / settings.interval_s) + 1):
        at = index * settings.interval_s
        replicas, asked = sample_of(at)
        counts: dict[str, int] = desired or {}
        if desired is None:
            for replica in replicas:
                counts[replica.pool] = counts.get(replica.pool, 0) + 1
        history.add(ScalingSample(at, counts, tuple(replicas), asked))
    return history


def poisson(
    rate: Callable[[float], float],
    seconds: float,
    sizes: Callable[[np.random.Generator, float], tuple[int, int]],
    seed: int = 0,
) -> list[Arrival]:
    """Independent arrivals at `rate(t)` a second; `sizes` draws prompt and output tokens at a time."""
    generator = np.random.default_rng(seed)
    most = max(rate(at) for at in np.linspace(0.0, seconds, 1001))
    arrivals, at = [], 0.0
    while (at := at + generator.exponential(1 / most)) < seconds:
        if generator.random() < rate(at) / most:
            arrivals.append(Arrival(at, *sizes(generator, at)))
    return arrivals


def evenly(per_s: float, seconds: float, prompt_tokens: int, output_tokens: int) -> list[Arrival]:
    """Arrivals at equal distances."""
    return [Arrival(n / per_s, prompt_tokens, output_tokens) for n in range(int(per_s * seconds))]


# ------------------------------------------------------------------------------------ single decisions

NOW = 400.0
NOTHING = Demand()
# 20 requests/s of 2000 tokens, with one token of output: nothing to decode.
PROMPTS = demand(40, output_tokens=1)
BUSY = {"num_running": 40, "num_free_blocks": 600}


def decided(
    replicas: Sequence[ReplicaSample] | Callable[[float], Sequence[ReplicaSample]],
    pools: Sequence[PoolView],
    asked: Demand = NOTHING,
    settings: ScalingConfig | None = None,
    now: float = NOW,
) -> ScalingPlan:
    """The plan after 400 s in which the replicas looked like this and so much was asked every 2 s."""
    settings = settings or config()
    desired = {view.name: view.desired for view in pools}
    history = history_of(
        settings, lambda at: (replicas(at) if callable(replicas) else replicas, asked), desired=desired
    )
    plan = decide(history, settings, pools, now)
    assert decide(history, settings, pools, now) == plan  # the same again: it keeps nothing
    return plan


def counts(plan: ScalingPlan) -> dict[str, tuple[int, int]]:
    return {move.pool: (move.before, move.after) for move in plan.moves}


PAIR = (pool("prefill"), pool("decode"))
RESTING = (prefilling(), decoding(num_running=1))


def queueing(backlog: int, **load: Any) -> ReplicaSample:
    return prefilling(num_running=1, num_waiting=8, num_backlog_tokens=backlog, **load)
