"""Estimates from samples, without state: speed of replicas, sizes and rate of requests, and their tails.

Means hide heavy tails: of two loads with the same tokens a second, the one that has them in a few huge
prompts needs more replicas. So waits and crowds are estimated at their 90th percentile, from first and second
moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The share of requests that may be served worse than what is planned for.
TAIL = 0.1
# How many standard deviations above its mean a normal value lies in that share of cases.
NORMAL_TAIL = 1.2816
_MIN_POINTS = 10
# A trend counts when it is this many standard errors from none: noise of a steady load is no trend.
_TREND_ERRORS = 3.0
_MIN_BLOCKS = 5
_MAX_DISPERSION = 25.0

_Floats = npt.NDArray[np.float64]


class CountedSpan(NamedTuple):
    """The number of arrivals in the `length_s` seconds that end at `at`."""

    at: float
    length_s: float
    num: float


class Forecast(NamedTuple):
    """An expected rate and where it comes from."""

    per_s: float
    # The mean rate over the whole history, in which recent samples count more.
    mean_per_s: float
    # 0 where the change of the rate cannot be distinguished from noise.
    trend_per_s2: float
    # Variance of the counts over their mean: 1 for independent arrivals, more for bursts.
    dispersion: float


class Moments(NamedTuple):
    """Mean and squared coefficient of variation of the demand of one request."""

    mean: float
    variation: float


def moments(count: float, total: float, squares: float) -> Moments | None:
    """Return the moments of `count` values with this sum and sum of squares; None without any."""
    if count <= 0:
        return None
    mean = total / count
    return Moments(mean, max(0.0, squares / count / mean**2 - 1.0) if mean > 0 else 0.0)


def forecast(
    spans: Sequence[CountedSpan], now: float, horizon_s: float, fade_s: float, block_s: float
) -> Forecast:
    """Return the rate to expect `horizon_s` after `now`: a line through the rates of blocks of `block_s`,
    weighted by length and by exp(-age / `fade_s`), where the line rises or falls beyond doubt; else the
    weighted mean of the rates.

    One block of ten that stands out, however far, is no trend: bursts are for the fast loop.
    """
    kept = [span for span in spans if span.length_s > 0]
    if not kept:
        return Forecast(0.0, 0.0, 0.0, 1.0)
    ages, lengths, counts = _blocks(kept, now, block_s)
    rates = counts / lengths
    weights = lengths * np.exp(-ages / fade_s)
    mean = float(np.average(rates, weights=weights))
    dispersion = _dispersion(kept)
    # A few blocks may lie on a line by chance: their noise is at least that of independent arrivals.
    slope, error = _slope(-ages, rates, weights, dispersion * mean / float(lengths.max()))
    if len(rates) < _MIN_BLOCKS or abs(slope) <= _TREND_ERRORS * error:
        return Forecast(mean, mean, 0.0, dispersion)
    middle = float(np.average(-ages, weights=weights))
    level = min(mean - slope * middle, float(rates.max()))
    return Forecast(max(0.0, level + slope * horizon_s), mean, slope, dispersion)


def _blocks(spans: Sequence[CountedSpan], now: float, block_s: float) -> tuple[_Floats, _Floats, _Floats]:
    """Return the mean age, the length and the count of each block that has anything, the latest first."""
    sums: dict[int, list[float]] = {}
    for span in spans:
        age_s = now - span.at + span.length_s / 2
        block = sums.setdefault(int(age_s // block_s), [0.0, 0.0, 0.0])
        block[0] += age_s * span.length_s
        block[1] += span.length_s
        block[2] += span.num
    ages, lengths, counts = np.array([sums[number] for number in sorted(sums)]).T
    return ages / lengths, lengths, counts


def mean_rate(spans: Sequence[CountedSpan]) -> float:
    """Return the mean rate per second; all spans count alike."""
    total_s = sum(span.length_s for span in spans)
    return sum(span.num for span in spans) / total_s if total_s > 0 else 0.0


def _slope(times: _Floats, rates: _Floats, weights: _Floats, least_variance: float) -> tuple[float, float]:
    """Return the slope of the weighted line, with its standard error (independent errors of equal
    variance)."""
    shares = weights / weights.sum()
    centred = times - float(np.sum(shares * times))
    spread = float(np.sum(shares * centred**2))
    if spread <= 0 or len(times) < 3:
        return 0.0, math.inf
    slope = float(np.sum(shares * centred * rates)) / spread
    residuals = rates - float(np.sum(shares * rates)) - slope * centred
    variance = float(np.sum(shares * residuals**2)) * len(times) / (len(times) - 2)
    error = math.sqrt(max(variance, least_variance) * float(np.sum((shares * centred) ** 2))) / spread
    return slope, error


def _dispersion(spans: Sequence[CountedSpan]) -> float:
    """Return the dispersion, at least 1, from differences of neighbours, so that a trend does not count as
    spread."""
    counts = np.array([span.num for span in spans], dtype=np.float64)
    lengths = np.array([span.length_s for span in spans])
    if len(counts) < _MIN_POINTS or counts.sum() <= 0:
        return 1.0
    variance = float(np.mean(np.diff(counts / lengths) ** 2)) / 2 * float(lengths.mean())
    return float(np.clip(variance / (counts.sum() / lengths.sum()), 1.0, _MAX_DISPERSION))


def waiting_share(load: float, num_servers: int) -> float:
    """Return Erlang's C: the share of requests that find all servers busy. `load` is in servers; the share is
    1 when the load is too much for them."""
    if load <= 0:
        return 0.0
    if load >= num_servers:
        return 1.0
    blocked = 1.0
    for server in range(1, num_servers + 1):
        blocked = load * blocked / (server + load * blocked)
    return blocked / (1 - load / num_servers * (1 - blocked))


def tail_wait_s(
    per_s: float, service: Moments, num_servers: int, dispersion: float = 1.0, tail: float = TAIL
) -> float:
    """Return the wait that a share `tail` of requests exceeds, in a queue before `num_servers` servers
    (infinite when they cannot keep up): exponential beyond zero, with the mean of Allen and Cunneen's
    approximation.

    `service` is in seconds; its variation and the arrivals' dispersion stretch the wait in proportion.
    """
    load = per_s * service.mean
    if load <= 0:
        return 0.0
    if load >= num_servers:
        return math.inf
    share = waiting_share(load, num_servers)
    if share <= tail:
        return 0.0
    decay_s = (dispersion + service.variation) / 2 * service.mean / (num_servers - load)
    return decay_s * math.log(share / tail)


def tail_crowd(mean: float, variation: float = 0.0, dispersion: float = 1.0) -> float:
    """Return the bound that the sum over all present exceeds for a share `TAIL` of the time only, in units of
    one.

    `mean` is how many are present on average (arrivals a second times how long each stays); each brings 1 on
    average, with this variation. Independent arrivals make their number Poisson whatever the lengths of stay.
    """
    return mean + NORMAL_TAIL * math.sqrt(mean * (1 + variation) * (1 + dispersion) / 2)
