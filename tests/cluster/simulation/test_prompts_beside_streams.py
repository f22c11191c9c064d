"""Decode replicas compute prompts within an objective, in a simulated cluster: whatever the division between
prefill and decode, and while answers get longer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.simulation.run_simulation import Simulated, SimulationPlan, run_simulation
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import DrawnLengths, SimulatedSession, drawn_sessions
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.simulated_scaling import PlannedScaling
from cluster.simulation.simulated_serve import ReplicaTimes
from cluster.simulation.simulation_result import SimulatedObjectives
from cluster.simulation.step_model import StepModel
from cluster.simulation.varying_load import varying_sessions

TTFT_S, TPOT_S = 3.0, 0.05
OBJECTIVES = SimulatedObjectives(TTFT_S, TPOT_S)
# A prompt of 6,000 tokens takes 0.38 s, and 40 sequences behind as many decode in steps of 37 ms.
ENGINE = SimulatedEngine(
    StepModel(0.015, 2e-4, 6e-8, 1 / 16_000), num_blocks=4000, block_tokens=128, max_sequences=64
)
TPOT_BOUND = ENGINE._replace(tpot_objective_s=TPOT_S)


def run(
    engine: SimulatedEngine,
    counts: tuple[int, int],
    sessions: Iterable[SimulatedSession],
    scaling: PlannedScaling | None = None,
) -> Simulated:
    roles = [("prefill", engine)] * counts[0] + [("decode", engine)] * counts[1]
    return run_simulation(SimulationPlan(ClusterShape(roles), sessions, OBJECTIVES, scaling=scaling))


def good_share(simulated: Simulated) -> float:
    records = simulated.result.records
    return sum(map(OBJECTIVES.kept_by, records)) / len(records)


def prompts(engine: SimulatedEngine, counts: tuple[int, int]) -> Simulated:
    """Run prompts that take 2.6 replicas, whose answers take 0.3."""
    return run(engine, counts, drawn_sessions(DrawnLengths(6000, 60), 7.0, 500, 1))


def test_decode_replicas_compute_the_prompts_for_which_prefill_replicas_are_too_few() -> None:
    simulated = prompts(TPOT_BOUND, (1, 3))
    assert good_share(simulated) > 0.95
    computed = {use.role: 0 for use in simulated.result.replicas}
    for use in simulated.result.replicas:
        computed[use.role] += use.num_computed
    assert computed["decode"] > computed["prefill"] > 0


def test_without_an_objective_streams_are_spared_and_prompts_wait() -> None:
    assert good_share(prompts(ENGINE, (1, 3))) < good_share(prompts(TPOT_BOUND, (1, 3))) - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("num_prefill", [1, 2, 3])
def test_no_exact_division_is_needed(num_prefill: int) -> None:
    sessions = drawn_sessions(DrawnLengths(6000, 300), 6.0, 1500, 2)
    assert good_share(run(TPOT_BOUND, (num_prefill, 6 - num_prefill), sessions)) > 0.97


@pytest.mark.slow
def test_autoscaling_follows_answers_that_get_longer() -> None:
    """Seventeen times longer within a minute: six replicas in place of three, which take 30 s to start."""

    def lengths(at: float) -> DrawnLengths:
        return DrawnLengths(6000, round(60 + 940 * min(1.0, max(0.0, (at - 240) / 60))))

    limits = PoolLimits(min=1, max=12)
    config = ScalingConfig(
        autoscale=True,
        pools={"prefill": limits, "decode": limits},
        ttft_slo_s=TTFT_S,
        itl_slo_s=TPOT_S,
    )
    sessions = varying_sessions(lambda at: 5.0, lengths, 600.0, 1)
    simulated = run(TPOT_BOUND, (1, 2), sessions, PlannedScaling(config, ReplicaTimes(30.0)))
    assert good_share(simulated) > 0.93
    assert {move.pool for move in simulated.moves} == {"decode"}
    assert max(move.after for move in simulated.moves if move.at < 600) in (5, 6, 7)
    assert simulated.result.replica_s / simulated.result.span_s < 5.5
    # The replicas of the beginning do not hold what comes.
    sessions = varying_sessions(lambda at: 5.0, lengths, 600.0, 1)
    assert good_share(run(TPOT_BOUND, (1, 2), sessions)) < 0.8
