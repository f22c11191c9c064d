"""A cluster that is offered more than it can do, in virtual time, of the code that serves."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from benchmarks.overload import SCENARIOS, Scenario, greedy, is_good, measured_capacity, recovered_s, run_load

# Of tests that have to be fast; the others have twice as many.
NUM_REPLICAS = 2
DURATION_S = 60.0


@functools.cache
def capacity_of(name: str) -> float:
    """Requests a second that the replicas get done, measured once for all tests of the scenario."""
    return measured_capacity(SCENARIOS[name], NUM_REPLICAS, duration_s=DURATION_S)


def goodput(scenario: Scenario, rate_s: float) -> float:
    """Requests a second, the mean of three loads of three minutes: chance alone moves that of one by a tenth,
    and that of a minute by a fifth."""
    loads = [run_load(scenario, 2 * NUM_REPLICAS, rate_s, 3 * DURATION_S, seed=seed) for seed in range(1, 4)]
    return float(np.mean([load.record()["goodput_per_s"] for load in loads]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "pools", "interactive", "decode_bound", "prefill_bound"])
def test_goodput_holds_whatever_is_the_bottleneck(name: str) -> None:
    scenario = SCENARIOS[name]
    capacity = measured_capacity(scenario, 2 * NUM_REPLICAS)
    peak = max(goodput(scenario, multiple * capacity) for multiple in (0.9, 1.2, 2.0))
    assert peak > 0.75 * capacity
    assert goodput(scenario, 5 * capacity) >= 0.9 * peak


def test_below_the_capacity_nothing_is_refused_and_objectives_are_kept() -> None:
    load = run_load(SCENARIOS["mixed"], NUM_REPLICAS, 0.5 * capacity_of("mixed"), DURATION_S)
    assert all(is_good(it, load.offered.config) for it in load.offered.requests)
    assert load.offered.highest_rung == 0


def test_goodput_holds_in_a_storm_and_is_back_soon_after_it_and_nothing_is_left() -> None:
    capacity = capacity_of("mixed")
    load = run_load(
        SCENARIOS["mixed"], NUM_REPLICAS, 5 * capacity, DURATION_S, after_s=30.0, after_rate_s=0.5 * capacity
    )
    assert load.record()["goodput_per_s"] >= 0.9 * capacity
    assert load.offered.highest_rung > 0
    recovered = recovered_s(load, 30.0)
    assert recovered is not None
    assert recovered < 5.0
    assert all(it.ended_at is not None for it in load.offered.requests)
    load.offered.cluster.check()


def test_batch_requests_that_are_queued_go_when_nothing_else_is_left() -> None:
    """The ladder stands on the rung that pauses them, and nothing comes that could move it."""
    load = run_load(SCENARIOS["mixed"], NUM_REPLICAS, 5 * capacity_of("mixed"), 20.0)
    assert load.offered.highest_rung > 0
    assert all(it.ended_at is not None for it in load.offered.requests)


@pytest.mark.slow
def test_a_greedy_tenant_takes_what_the_others_leave() -> None:
    record = greedy(2 * NUM_REPLICAS, 2 * DURATION_S)
    assert record["served_share_of_greedy"] <= record["share_left"] + 0.1
    assert all(part >= 0.95 for name, part in record["good_part"].items() if name != "greedy")
