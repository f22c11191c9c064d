"""The scaling policy over whole loads: simulated clusters are scaled by the scaler that serves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.simulation.run_simulation import Simulated, SimulationPlan, run_simulation
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import DrawnLengths
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.simulated_scaling import PlannedScaling
from cluster.simulation.simulated_serve import ReplicaTimes
from cluster.simulation.simulation_result import SimulatedObjectives
from cluster.simulation.step_model import StepModel
from cluster.simulation.varying_load import varying_sessions

# 1,000 tokens of prompts a second; ten sequences decode in steps of 200 ms, the objective.
STEPS = StepModel(base_s=0.1, sequence_s=0.01, context_s=0.0, token_s=1e-3)
ENGINE = SimulatedEngine(STEPS, num_blocks=400, block_tokens=64, max_sequences=16)
LOAD = ScalingConfig().target_load
PREFILL_TOK_S, DECODE_TOK_S = 1000.0, 10 / 0.2
OBJECTIVES = SimulatedObjectives(4.0, 0.2)


def scaled(
    rate_s: Callable[[float], float] | float,
    lengths: Callable[[float], tuple[int, int]],
    span_s: float,
    counts: dict[str, int],
    *,
    engine: SimulatedEngine = ENGINE,
    limits: dict[str, PoolLimits] | None = None,
    sigma: float = 0.0,
    seed: int = 1,
    **changes: Any,
) -> Simulated:
    """Simulate `span_s` seconds of arrivals with `lengths(at)` tokens before so many replicas of each role,
    which start in 6 s and are scaled up to eight."""
    config = ScalingConfig(
        autoscale=True,
        pools=limits or dict.fromkeys(counts, PoolLimits(min=1, max=8)),
        ttft_slo_s=OBJECTIVES.ttft_s,
        itl_slo_s=OBJECTIVES.tpot_s,
        **{"forecast_s": 40.0, "up_cool_down_s": 3.0, "down_cool_down_s": 12.0, **changes},
    )
    sessions = varying_sessions(
        rate_s if callable(rate_s) else lambda at: rate_s,
        lambda at: DrawnLengths(*lengths(at), sigma),
        span_s,
        seed,
    )
    replicas = [(role, engine) for role, count in counts.items() for _ in range(count)]
    plan = SimulationPlan(
        ClusterShape(replicas), sessions, OBJECTIVES, scaling=PlannedScaling(config, ReplicaTimes(6.0))
    )
    return run_simulation(plan)


def counts_at(run: Simulated, at: float, counts: dict[str, int]) -> dict[str, int]:
    """Return what was ordered by then."""
    return counts | {move.pool: move.after for move in run.moves if move.at <= at}


def by_demand(per_s: float, prompt: int, output: int) -> dict[str, int]:
    """Return the counts from first principles: tokens a second over four fifths of what a replica does."""
    return {
        "prefill": math.ceil(per_s * prompt / (LOAD * PREFILL_TOK_S)),
        "decode": math.ceil(per_s * output / (LOAD * DECODE_TOK_S)),
    }


def suits(found: dict[str, int], per_s: float, prompt: int, output: int) -> bool:
    """Whether the counts serve the demand, and no pool would shrink: a fifth more needs as many."""
    least, most = (by_demand(margin * per_s, prompt, output) for margin in (1.0, 1.2))
    return all(least[pool] <= found[pool] <= most[pool] for pool in found)


def good_share(run: Simulated) -> float:
    records = run.result.records
    return sum(map(OBJECTIVES.kept_by, records)) / len(records)


PAIR = {"prefill": 1, "decode": 1}


@pytest.mark.slow
def test_a_ramp_has_the_counts_of_its_demand_and_the_forecast_leads_it() -> None:
    """From 0.8 to 3.2 requests/s in a minute, then level: 3 or 4 of each."""
    run = scaled(lambda at: min(3.2, 0.8 + at / 25), lambda at: (600, 30), 120.0, PAIR)
    assert suits(counts_at(run, 115.0, PAIR), 3.2, 600, 30)
    upward = [move for move in run.moves if move.after > move.before]
    by_forecast = [move for move in upward if move.reason.startswith("forecast: ")]
    assert len(by_forecast) >= len(upward) - 1
    assert good_share(run) > 0.95


@pytest.mark.slow
def test_a_burst_grows_both_pools_and_they_come_back() -> None:
    """One request a second, five for 15 s."""
    run = scaled(lambda at: 5.0 if 40 <= at < 55 else 1.0, lambda at: (500, 20), 130.0, PAIR)
    assert counts_at(run, 40.0, PAIR) == by_demand(1.0, 500, 20) == PAIR
    first = next(move for move in run.moves if move.at >= 40)
    assert first.at <= 50.0
    assert max(move.after for move in run.moves if move.pool == "prefill") >= 3
    assert suits(counts_at(run, 130.0, PAIR), 1.0, 500, 20)
    assert all(record.is_good or record.refusal == "refused" for record in run.result.records)


def test_longer_answers_grow_decode_and_leave_prefill_alone() -> None:
    """Two replicas of decode in place of one."""
    run = scaled(1.35, lambda at: (300, 10 if at < 30 else 45), 90.0, PAIR)
    assert counts_at(run, 30.0, PAIR) == PAIR
    assert counts_at(run, 85.0, PAIR) == by_demand(1.35, 300, 45) == {"prefill": 1, "decode": 2}
    assert {move.pool for move in run.moves} == {"decode"}


def test_prefill_stays_while_its_prompts_wait_for_decode() -> None:
    """Decode has few KV blocks: more prefill would not help, and more decode does."""
    small = ENGINE._replace(num_blocks=60)
    few = {"prefill": PoolLimits(min=1, max=8), "decode": PoolLimits(min=1, max=1)}
    held = scaled(1.0, lambda at: (500, 60), 50.0, PAIR, engine=small, limits=few)
    assert held.moves == ()
    free = scaled(1.0, lambda at: (500, 60), 50.0, PAIR, engine=small)
    assert {move.pool for move in free.moves} == {"decode"}
    assert good_share(free) > good_share(held) + 0.2


def test_one_pool_that_does_both_follows_the_demand() -> None:
    both = {"both": 1}
    run = scaled(2.0, lambda at: (300, 20), 60.0, both)
    busy = 2 * 300 / PREFILL_TOK_S + 2 * 20 / DECODE_TOK_S
    assert counts_at(run, 55.0, both)["both"] in (math.ceil(busy / LOAD), math.ceil(1.2 * busy / LOAD))
    assert all(record.is_good for record in run.result.records)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    per_s=st.floats(1.0, 12.0),
    prompt=st.integers(25, 500),
    output=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_a_steady_load_moves_each_pool_once_at_most_and_never_back(
    per_s: float, prompt: int, output: int, seed: int
) -> None:
    """Poisson arrivals with sizes that vary by a fifth, at the times that are the defaults but for twice the
    cool-down; the pools begin where the demand puts them."""
    counts = by_demand(per_s, prompt, output)
    run = scaled(
        per_s,
        lambda at: (prompt, output),
        600.0,
        counts,
        limits=dict.fromkeys(counts, PoolLimits(min=1, max=16)),
        sigma=0.2,
        seed=seed,
        forecast_s=300.0,
        up_cool_down_s=15.0,
        down_cool_down_s=120.0,
    )
    for name in counts:
        own = [move for move in run.moves if move.pool == name and move.at < 600]
        assert len(own) <= 1, [(move.at, move.before, move.after, move.reason) for move in own]
