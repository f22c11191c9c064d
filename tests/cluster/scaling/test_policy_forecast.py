"""The estimators against closed forms, exact sums and simulated queues."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scaling.forecast import (
    CountedSpan,
    Forecast,
    Moments,
    forecast,
    mean_rate,
    moments,
    tail_crowd,
    tail_wait_s,
    waiting_share,
)

# The squared coefficient of variation of exponential times.
EXPONENTIAL = 1.0


def spells(counts: list[float], length_s: float = 2.0) -> list[CountedSpan]:
    return [CountedSpan((n + 1) * length_s, length_s, count) for n, count in enumerate(counts)]


def predicted(counts: list[float], horizon_s: float = 30.0) -> Forecast:
    last = spells(counts)
    return forecast(last, last[-1].at, horizon_s, 150.0, 30.0)


# ---------------------------------------------------------------------------------------------- rates


def test_a_constant_rate_is_its_own_forecast() -> None:
    found = predicted([8.0] * 150)
    assert found.per_s == pytest.approx(4.0)
    assert found.trend_per_s2 == 0.0
    assert found.dispersion == 1.0


def test_a_ramp_is_drawn_out_to_the_horizon() -> None:
    # 0.02/s more every second: the count of the 2 s that end at t is 2 * 0.02 * (t - 1).
    found = predicted([0.04 * (2 * n + 1) for n in range(150)], horizon_s=60.0)
    assert found.trend_per_s2 == pytest.approx(0.02)
    # The level at the end is bounded by the highest tenth, whose middle is 15 s before the end.
    assert found.per_s == pytest.approx(0.02 * (300 - 15) + 0.02 * 60)


def test_a_falling_rate_is_not_negative() -> None:
    assert predicted([100.0 - n for n in range(100)], horizon_s=500.0).per_s == 0.0


@pytest.mark.parametrize(("num_blocks", "is_trend"), [(1, False), (4, True)])
def test_a_step_counts_when_it_lasts_and_is_not_drawn_out_beyond_what_came(
    num_blocks: int, is_trend: bool
) -> None:
    num_high = 15 * num_blocks
    found = predicted([2.0] * (150 - num_high) + [20.0] * num_high, horizon_s=0.0)
    assert (found.trend_per_s2 > 0) is is_trend
    assert found.mean_per_s <= found.per_s <= 10.0


def test_noise_of_a_steady_load_is_no_trend() -> None:
    generator = np.random.default_rng(3)
    trends = [predicted(generator.poisson(6.0, 150).tolist()).trend_per_s2 for _ in range(300)]
    # Three standard errors: 0.3 % of the cases.
    assert sum(trend != 0 for trend in trends) <= 4


def test_dispersion_is_one_for_poisson_and_more_for_batches() -> None:
    generator = np.random.default_rng(5)
    single = predicted(generator.poisson(6.0, 3000).tolist()).dispersion
    in_tens = predicted((10 * generator.poisson(0.6, 3000)).tolist()).dispersion
    assert single == pytest.approx(1.0, abs=0.1)
    assert in_tens == pytest.approx(10.0, rel=0.1)  # the variance of 10 X over its mean


def test_a_trend_is_no_dispersion() -> None:
    assert predicted([float(n) for n in range(300)]).dispersion == 1.0


def test_without_spells_nothing_is_expected() -> None:
    assert forecast([], 0.0, 30.0, 150.0, 30.0).per_s == 0.0
    assert mean_rate([]) == 0.0
    assert mean_rate([CountedSpan(2.0, 2.0, 3.0), CountedSpan(3.0, 1.0, 0.0)]) == 1.0


def test_moments_are_those_of_numpy() -> None:
    values = np.random.default_rng(1).pareto(3.0, 1000) * 500
    found = moments(len(values), float(values.sum()), float((values**2).sum()))
    assert found is not None
    assert found.mean == pytest.approx(values.mean())
    assert found.variation == pytest.approx(values.var() / values.mean() ** 2)
    assert moments(0, 0.0, 0.0) is None
    assert moments(5, 0.0, 0.0) == Moments(0.0, 0.0)


# ---------------------------------------------------------------------------------------------- queues


@pytest.mark.parametrize(("load", "num_servers"), [(0.5, 1), (2.0, 3), (9.5, 10), (40.0, 50)])
def test_erlang_c_is_the_sum_of_its_definition(load: float, num_servers: int) -> None:
    terms = [load**k / math.factorial(k) for k in range(num_servers)]
    last = load**num_servers / math.factorial(num_servers) * num_servers / (num_servers - load)
    assert waiting_share(load, num_servers) == pytest.approx(last / (sum(terms) + last))


def test_a_server_alone_waits_as_in_the_textbook() -> None:
    # M/M/1: P(wait > t) = rho * exp(-(mu - lambda) t).
    found = tail_wait_s(0.8, Moments(1.0, EXPONENTIAL), 1)
    assert 0.8 * math.exp(-(1.0 - 0.8) * found) == pytest.approx(0.1)


@pytest.mark.parametrize("variation", [0.0, 1.0, 4.0])
def test_the_tail_of_the_wait_is_that_of_a_simulated_queue(variation: float) -> None:
    """Lindley's recursion with gamma-distributed times of this variation."""
    generator = np.random.default_rng(2)
    per_s, number = 0.75, 200_000
    gaps = generator.exponential(1 / per_s, number)
    times = generator.gamma(1 / variation, variation, number) if variation else np.ones(number)
    waits, wait = [], 0.0
    for gap, time in zip(gaps.tolist(), times.tolist(), strict=True):
        waits.append(wait)
        wait = max(0.0, wait + time - gap)
    assert tail_wait_s(per_s, Moments(1.0, variation), 1) == pytest.approx(
        float(np.quantile(waits, 0.9)), rel=0.15
    )


def test_who_cannot_keep_up_waits_for_ever() -> None:
    assert tail_wait_s(3.0, Moments(1.0, 0.0), 3) == math.inf
    assert tail_wait_s(0.0, Moments(1.0, 0.0), 1) == 0.0


@pytest.mark.parametrize("mean", [5.0, 40.0, 300.0])
def test_a_crowd_is_the_quantile_of_poisson(mean: float) -> None:
    counts = np.random.default_rng(4).poisson(mean, 100_000)
    assert tail_crowd(mean) == pytest.approx(float(np.quantile(counts, 0.9)), abs=1.0)


def test_a_crowd_of_unequal_members_needs_more_space() -> None:
    """The 90th percentile of sums of a Poisson number of exponential sizes (variation 1)."""
    generator = np.random.default_rng(6)
    sums = [generator.exponential(1.0, generator.poisson(50.0)).sum() for _ in range(20_000)]
    assert tail_crowd(50.0, variation=1.0) == pytest.approx(float(np.quantile(sums, 0.9)), rel=0.03)


@given(
    per_s=st.floats(0.01, 50),
    more=st.floats(1.0, 3.0),
    seconds=st.floats(0.01, 2.0),
    variation=st.floats(0, 10),
    num_servers=st.integers(1, 60),
)
def test_more_load_waits_longer_and_more_servers_shorter(
    per_s: float, more: float, seconds: float, variation: float, num_servers: int
) -> None:
    service = Moments(seconds, variation)
    wait_s = tail_wait_s(per_s, service, num_servers)
    assert tail_wait_s(per_s * more, service, num_servers) >= wait_s
    assert tail_wait_s(per_s, service, num_servers + 1) <= wait_s
    assert tail_wait_s(per_s, service._replace(variation=variation + 1), num_servers) >= wait_s
