"""The slow floor and the measured side: counts from first principles, demand over capacity."""

from __future__ import annotations

import dataclasses
import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_harness import RATES, SIZES, config, decoding, demand, history_of, prefilling

from cluster.metrics.demand import Demand
from cluster.roster.messages import ScalingChange
from cluster.scaling.forecast import Moments
from cluster.scaling.forecast_replicas import (
    ExpectedLoad,
    both_need,
    decode_need,
    forecast_replicas,
    prefill_need,
)
from cluster.scaling.measured_rates import (
    MeasuredRates,
    RequestSizes,
    StepCost,
    measured_arrivals,
    measured_rates,
    measured_sizes,
    step_cost,
)
from cluster.scaling.samples import DemandMeter, History, ReplicaSample, ScalingSample, last_changes


def load(per_s: float, rates: MeasuredRates = RATES, sizes: RequestSizes = SIZES) -> ExpectedLoad:
    return ExpectedLoad(per_s, 1.0, sizes, rates)


# ---------------------------------------------------------------------------------------- the floor


@pytest.mark.parametrize("per_s", [0.5, 2.9, 3.1, 10.0, 40.0])
def test_prefill_is_demand_over_capacity(per_s: float) -> None:
    need = prefill_need(load(per_s), config(ttft_slo_s=30.0))
    assert need.num_replicas == math.ceil(per_s * 2000 / (0.75 * 8000))
    assert "2000 tokens" in need.reason
    assert "8000 tok/s" in need.reason
    assert f"need {need.num_replicas}" in need.reason


@pytest.mark.parametrize("per_s", [1.0, 5.0, 10.0, 50.0])
def test_decode_is_tokens_over_those_of_the_largest_batch_in_time(per_s: float) -> None:
    tok_s = 64 / (0.012 + 0.0004 * 64)
    need = decode_need(load(per_s), config())
    assert need.num_replicas == math.ceil(per_s * 200 / (0.75 * tok_s))
    assert "batches of 64" in need.reason


def test_a_tighter_objective_has_smaller_batches_and_more_replicas() -> None:
    batch = RATES.step.largest_batch(0.02, 64) if RATES.step else 0
    assert batch == 20  # 12 ms + 20 * 0.4 ms
    need = decode_need(load(20.0, RATES._replace(batch=batch)), config(itl_slo_s=0.02))
    assert need.num_replicas == math.ceil(20 * 200 * 0.02 / 20 / 0.75)


def test_decode_is_by_kv_blocks_where_the_cache_is_what_runs_out() -> None:
    rates = RATES._replace(blocks_per_sequence=50.0)
    need = decode_need(load(10.0, rates), config())
    present = 10 * 200 * 0.0376
    assert need.num_replicas == math.ceil(present / 0.75 * 50 / 1000)
    assert "KV blocks" in need.reason
    assert decode_need(load(10.0), config()).num_replicas == 1 + int(present / 0.75 / 64)


def test_a_heavy_tail_needs_more_prefill_than_its_mean_says() -> None:
    """The same tokens a second: in prompts of 2000, and in prompts of which few are huge."""
    heavy = SIZES._replace(prompt=Moments(2000.0, 20.0))
    even, uneven = prefill_need(load(8.0), config()), prefill_need(load(8.0, sizes=heavy), config())
    assert even.num_replicas == 3  # 16,000 tok/s over 6000
    assert uneven.num_replicas == 4
    assert "need 3; 4 so that 90% have their first token within 2 s" in uneven.reason
    assert "squared variation 20.0" in uneven.reason
    # And so it is in a queue: three miss the objective, four keep it.
    assert waited_s(8.0, 0.25, 20.0, 3) + 0.25 > 2.0 > waited_s(8.0, 0.25, 20.0, 4) + 0.25


def waited_s(per_s: float, mean_s: float, variation: float, num_servers: int) -> float:
    """The 90th percentile of the wait in one queue before servers with gamma-distributed times, simulated."""
    generator = np.random.default_rng(7)
    number = 100_000
    arrivals = np.cumsum(generator.exponential(1 / per_s, number)).tolist()
    times = generator.gamma(1 / variation, mean_s * variation, number).tolist()
    free_at = [0.0] * num_servers
    waits = []
    for arrived, time in zip(arrivals, times, strict=True):
        begun = max(arrived, free_at[0])
        waits.append(begun - arrived)
        heapq.heapreplace(free_at, begun + time)
    return float(np.quantile(waits, 0.9))


def test_a_heavy_tail_of_outputs_needs_more_blocks() -> None:
    rates = RATES._replace(blocks_per_sequence=50.0)
    heavy = SIZES._replace(output=Moments(200.0, 20.0))
    even = decode_need(load(10.0, rates), config()).num_replicas
    uneven = decode_need(load(10.0, rates, heavy), config()).num_replicas
    assert even is not None
    assert uneven is not None
    assert uneven > even


def test_a_prompt_that_takes_longer_than_the_objective_is_not_cured_by_numbers() -> None:
    long = SIZES._replace(prompt=Moments(40_000.0, 0.0))
    assert prefill_need(load(0.1, sizes=long), config()).num_replicas == 1


def test_nothing_is_needed_that_was_not_measured() -> None:
    unmeasured = RATES._replace(prefill_tok_s=0.0, step=None)
    assert prefill_need(load(1.0, unmeasured), config()).num_replicas is None
    assert decode_need(load(1.0, unmeasured), config()).num_replicas is None
    assert both_need(load(1.0, unmeasured), load(1.0, unmeasured), config()).num_replicas is None
    assert prefill_need(load(0.0, unmeasured), config()).num_replicas == 1
    assert decode_need(load(0.0, unmeasured), config()).num_replicas == 1


def test_prompts_that_are_all_cached_keep_nobody_busy() -> None:
    cached = SIZES._replace(prompt=Moments(0.0, 0.0))
    assert prefill_need(load(100.0, RATES._replace(prefill_tok_s=0.0), cached), config()).num_replicas == 1


def test_replicas_that_do_both_add_up_both_times() -> None:
    busy = 10 * 2000 / 8000 + 10 * 200 * 0.0376 / 64
    need = both_need(load(10.0), load(10.0), config())
    assert need.num_replicas == math.ceil(busy / 0.75)


def test_what_dedicated_pools_cannot_serve_is_left_to_those_that_do_both() -> None:
    needs = forecast_replicas(load(24.0), config(), {"prefill": 4, "decode": 10, "both": 10})
    assert needs["prefill"].num_replicas == 8
    # Half of the prompts, and no decoding: it fits where it belongs.
    assert needs["both"].num_replicas == math.ceil(12 * 2000 / 8000 / 0.75)


@given(
    per_s=st.floats(0.01, 100),
    more=st.floats(1.0, 4.0),
    prompt=st.floats(1, 100_000),
    output=st.floats(1, 5000),
    variation=st.floats(0, 30),
    dispersion=st.floats(1, 20),
)
def test_more_demand_never_needs_fewer(
    per_s: float, more: float, prompt: float, output: float, variation: float, dispersion: float
) -> None:
    sizes = RequestSizes(Moments(prompt, variation), Moments(output, variation), 1.0)
    small, large = (ExpectedLoad(rate, dispersion, sizes, RATES) for rate in (per_s, per_s * more))
    for needed in (prefill_need, decode_need):
        few, many = needed(small, config()).num_replicas, needed(large, config()).num_replicas
        assert few is not None
        assert many is not None
        assert 1 <= few <= many
    few, many = (both_need(each, each, config()).num_replicas for each in (small, large))
    assert few is not None
    assert many is not None
    assert 1 <= few <= many


# ------------------------------------------------------------------------------------ what is measured


def test_the_step_time_is_a_line_through_the_batches() -> None:
    points = [(1.0, batch, 0.012 + 0.0004 * batch) for batch in (4, 16, 40)]
    found = step_cost(points)
    assert found is not None
    assert found.step_s(20) == pytest.approx(0.02)
    assert found.per_sequence_s == pytest.approx(0.0004, rel=0.02)


def test_while_batches_are_alike_three_quarters_of_a_step_are_taken_to_be_fixed() -> None:
    found = step_cost([(1.0, 10, 0.02), (1.0, 10, 0.02), (1.0, 0, 9.0), (1.0, 5, 0.0)])
    assert found is not None
    assert found.fixed_s == pytest.approx(0.015)
    assert found.per_sequence_s == pytest.approx(0.0005)
    assert step_cost([(1.0, 0, 0.02)]) is None


def test_a_little_spread_says_a_little() -> None:
    """Batches of 9 and 11 vary by the share that the assumption weighs: half of each slope."""
    found = step_cost([(1.0, 9, 0.02 - 0.001), (1.0, 11, 0.02 + 0.001)])
    assert found is not None
    assert found.per_sequence_s == pytest.approx((0.001 + 0.0005) / 2)


def test_neither_part_of_a_step_is_negative() -> None:
    falling = step_cost([(1.0, 4, 0.03), (1.0, 40, 0.02)])
    assert falling is not None
    assert falling.per_sequence_s == 0.0
    assert falling.fixed_s == pytest.approx(0.025)
    steep = step_cost([(1.0, 4, 0.001), (1.0, 40, 0.1)])
    assert steep is not None
    assert steep.fixed_s == pytest.approx(0.0)


def test_the_largest_batch_is_within_the_objective() -> None:
    cost = StepCost(0.01, 0.001)
    assert cost.largest_batch(0.05, 64) == 40
    assert cost.largest_batch(0.05, 30) == 30
    assert cost.largest_batch(0.005, 64) == 1
    assert StepCost(0.01, 0.0).largest_batch(0.05, 64) == 64


def test_the_prefill_rate_is_that_under_load() -> None:
    """Short steps of an idle replica do not say how fast a busy one is."""
    history = history_of(
        config(),
        lambda at: (
            [prefilling(prefill_tok_s=9000.0 if at >= 300 else 1000.0, num_backlog_tokens=int(at >= 300))],
            Demand(),
        ),
    )
    rates = measured_rates(history, config(), 64, 400.0, True)
    assert rates.prefill_tok_s == pytest.approx(9000.0)
    idle = history_of(config(), lambda at: ([prefilling(prefill_tok_s=1000.0)], Demand()))
    assert measured_rates(idle, config(), 64, 400.0, True).prefill_tok_s == pytest.approx(1000.0)


def test_no_batch_is_larger_than_its_slots() -> None:
    """Sequences above them are there and not computed."""
    replicas = [
        decoding(0, num_running=20, decode_step_s=0.02),
        decoding(1, num_running=90, decode_step_s=0.03),
    ]
    rates = measured_rates(history_of(config(), lambda at: (replicas, Demand())), config(), 40, 400.0, True)
    assert rates.step is not None
    assert rates.step.per_sequence_s == pytest.approx((0.03 - 0.02) / (40 - 20), rel=0.05)


def test_what_a_sequence_holds_counts_landings_and_not_those_that_wait() -> None:
    replica = decoding(num_running=6, num_landings=6, num_waiting_landings=2, num_free_blocks=800)
    history = history_of(config(), lambda at: ([replica, decoding(1)], Demand()))
    assert measured_rates(history, config(), 64, 400.0, True).blocks_per_sequence == pytest.approx(20.0)


def test_rates_of_late_count_more() -> None:
    history = history_of(
        config(),
        lambda at: (
            [prefilling(prefill_tok_s=4000.0 if at < 250 else 8000.0, num_backlog_tokens=9)],
            Demand(),
        ),
    )
    # Of the last 300 s, 150 at each rate, weighted by exp(-age / 150 s).
    old, late = math.exp(-1) - math.exp(-2), 1 - math.exp(-1)
    expected = (4000 * old + 8000 * late) / (old + late)
    assert measured_rates(history, config(), 64, 400.0, True).prefill_tok_s == pytest.approx(
        expected, rel=0.01
    )


def test_old_figures_of_a_replica_are_none() -> None:
    history = history_of(config(), lambda at: ([prefilling(age_s=60.0)], Demand()))
    assert measured_rates(history, config(), 64, 400.0, True).prefill_tok_s == 0.0


def test_decode_replicas_prefill_where_nobody_else_does() -> None:
    history = history_of(config(), lambda at: ([decoding(prefill_tok_s=3000.0)], Demand()))
    assert measured_rates(history, config(), 64, 400.0, has_prefill=False).prefill_tok_s == pytest.approx(
        3000
    )
    assert measured_rates(history, config(), 64, 400.0, has_prefill=True).prefill_tok_s == 0.0


def test_sizes_and_demand_are_those_of_the_samples() -> None:
    history = history_of(
        config(), lambda at: ([], dataclasses.replace(demand(6, 1000, 50), num_sequences=12))
    )
    sizes = measured_sizes(history, 400.0, 150.0)
    assert sizes.prompt is not None
    assert sizes.output is not None
    assert (*sizes.prompt, *sizes.output) == pytest.approx((1000.0, 0.0, 50.0, 0.0))
    assert sizes.sequences_per_request == pytest.approx(2.0)
    work = measured_arrivals(history, config(), 30.0, 400.0)
    assert work.expected.per_s == pytest.approx(3.0)
    assert work.lasting_per_s == pytest.approx(3.0)


def test_what_came_last_counts_although_it_gets_less() -> None:
    """Falling to nothing by the horizon; the last 120 s still had (0.6 + 0)/2 a second."""
    history = history_of(config(), lambda at: ([], Demand(num_arrived=round(4000 - 10 * at))))
    work = measured_arrivals(history, config(), 150.0, 400.0)
    assert work.expected.per_s == 0.0
    assert work.lasting_per_s == pytest.approx(5 * 120 / 2, rel=0.03)


def test_a_replica_that_computed_nothing_yet_says_nothing() -> None:
    replicas = [prefilling(0), prefilling(1, prefill_tok_s=0.0)]
    rates = measured_rates(history_of(config(), lambda at: (replicas, Demand())), config(), 64, 400.0, True)
    assert rates.prefill_tok_s == pytest.approx(8000.0)


# --------------------------------------------------------------------------------------- the history


def test_a_history_keeps_its_span() -> None:
    history = History(10.0)
    for at in range(100):
        history.add(ScalingSample(float(at), {}, (), Demand()))
    assert [sample.at for sample in history] == [float(at) for at in range(89, 100)]
    assert history.covered_s == 10.0
    assert [sample.at for sample in history.since(97.5)] == [98.0, 99.0]
    history.add(ScalingSample(50.0, {}, (), Demand()))
    assert [sample.at for sample in history] == [50.0]


def test_a_start_is_timed_from_the_order_to_the_last_replica() -> None:
    history = History(1000.0)
    assert history.start_s("decode") == 30.0
    for at in range(0, 60, 2):
        num_ready = 1 if at < 24 else 2 if at < 46 else 3
        replicas = tuple(decoding(number) for number in range(num_ready))
        history.add(ScalingSample(float(at), {"decode": 1 if at < 10 else 3}, replicas, Demand()))
    assert history.start_s("decode") == 46 - 10


def test_orders_that_follow_each_other_are_timed_each() -> None:
    history = History(1000.0)
    found = []
    for at in range(0, 60, 2):
        desired = 1 if at < 10 else 2 if at < 24 else 4 if at < 40 else 3
        num_ready = 1 if at < 30 else 2 if at < 44 else 3
        replicas = tuple(decoding(number) for number in range(num_ready))
        history.add(ScalingSample(float(at), {"decode": desired}, replicas, Demand()))
        found.append(history.start_s("decode"))
    # The second order was changed before it was ready: 3 are seen as ordered when 4 no longer are.
    assert found == [30.0] * 15 + [20.0] * 7 + [4.0] * 8
    assert History(1.0).start_s("prefill") == 30.0


def test_the_meter_sums_the_gateways_and_starts_when_they_are_heard() -> None:
    meter = DemandMeter()
    meter.add("a", Demand(num_arrived=100, num_gaps=7))
    assert meter.take() == Demand()  # what came before is not of now
    meter.add("a", Demand(num_arrived=103, num_gaps=9))
    meter.add("b", Demand(num_arrived=50))
    meter.add("b", Demand(num_arrived=55))
    assert meter.take() == Demand(num_arrived=8, num_gaps=2)
    assert meter.take() == Demand()


def test_a_counter_that_went_back_began_anew() -> None:
    meter = DemandMeter()
    meter.add("a", Demand(num_arrived=100))
    meter.add("a", Demand(num_arrived=4))
    assert meter.take() == Demand(num_arrived=4)
    meter.keep(())
    meter.add("a", Demand(num_arrived=90))
    assert meter.take() == Demand()


def test_changes_of_roles_are_no_changes_of_counts() -> None:
    moves = [
        ScalingChange(1.0, "decode", 1, 3, "operator", ""),
        ScalingChange(2.0, "decode", 3, 2, "autoscaler", ""),
        ScalingChange(3.0, "decode", 2, 2, "autoscaler", "lent"),
        ScalingChange(4.0, "prefill", 1, 2, "autoscaler", ""),
    ]
    assert last_changes("decode", moves) == (1.0, 2.0)
    assert last_changes("both", moves) == (None, None)


@pytest.mark.parametrize(
    ("load", "is_idle"),
    [
        ({}, True),
        ({"num_running": 1}, False),
        ({"num_waiting": 1}, False),
        ({"num_landings": 1}, False),
        ({"num_backlog_tokens": 1}, False),
        ({"num_total_blocks": 0}, False),
    ],
)
def test_idle_is_without_any_work(load: dict[str, int], is_idle: bool) -> None:
    replica: ReplicaSample = decoding(**load)
    assert replica.is_idle is is_idle
