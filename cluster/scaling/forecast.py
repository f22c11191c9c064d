"""Estimates from samples, without state: speed of replicas, sizes and rate of requests, and their tails.

Means hide heavy tails: of two loads with the same tokens a second, the one that has them in a few huge
prompts needs more replicas. So waits and crowds are estimated at their 90th percentile, from first and second
moments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.scaling.config import ScalingConfig
from cluster.scaling.samples import (
    DECODE,
    PREFILL,
    History,
    ReplicaSample,
    ScalingSample,
    kind_of,
)

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
    """What came in the `length_s` seconds that end at `at`."""

    at: float
    length_s: float
    num: float


class Forecast(NamedTuple):
    """An expected rate and where it comes from."""

    per_s: float
    # Of the whole history, recent samples counting more.
    mean_per_s: float
    # 0 where the change of the rate cannot be distinguished from noise.
    trend_per_s2: float
    # Variance of the counts over their mean: 1 for independent arrivals, more for bursts.
    dispersion: float


class Moments(NamedTuple):
    """Mean and squared coefficient of variation of what one request asks for."""

    mean: float
    variation: float


def moments(count: float, total: float, squares: float) -> Moments | None:
    """Of `count` values with this sum and sum of squares; None without any."""
    if count <= 0:
        return None
    mean = total / count
    return Moments(mean, max(0.0, squares / count / mean**2 - 1.0) if mean > 0 else 0.0)


def forecast(
    spans: Sequence[CountedSpan], now: float, horizon_s: float, fade_s: float, block_s: float
) -> Forecast:
    """The rate to expect `horizon_s` after `now`: a line through the rates of blocks of `block_s`, weighted
    by length and by exp(-age / `fade_s`), where it rises or falls beyond doubt; else their weighted mean.

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
    """Mean age, length and count of each block that has anything, the latest first."""
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
    """Per second, all of them counting alike."""
    total_s = sum(span.length_s for span in spans)
    return sum(span.num for span in spans) / total_s if total_s > 0 else 0.0


def _slope(times: _Floats, rates: _Floats, weights: _Floats, least_variance: float) -> tuple[float, float]:
    """Of the weighted line, with its standard error (independent errors of equal variance)."""
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
    """From differences of neighbours, so that a trend does not count as spread; at least 1."""
    counts = np.array([span.num for span in spans], dtype=np.float64)
    lengths = np.array([span.length_s for span in spans])
    if len(counts) < _MIN_POINTS or counts.sum() <= 0:
        return 1.0
    variance = float(np.mean(np.diff(counts / lengths) ** 2)) / 2 * float(lengths.mean())
    return float(np.clip(variance / (counts.sum() / lengths.sum()), 1.0, _MAX_DISPERSION))


def waiting_share(load: float, num_servers: int) -> float:
    """Erlang's C: the share of requests that find all servers busy. `load` is in servers; 1 when it is too
    much for them."""
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
    """What a share `tail` of requests wait longer than, in a queue before `num_servers` servers (infinite
    when they cannot keep up): exponential beyond zero, with the mean of Allen and Cunneen's approximation.

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
    """What the sum over all present stays below but for a share `TAIL` of the time, in units of one.

    `mean` is how many are present on average (arrivals a second times how long each stays); each brings 1 on
    average, with this variation. Independent arrivals make their number Poisson whatever the lengths of stay.
    """
    return mean + NORMAL_TAIL * math.sqrt(mean * (1 + variation) * (1 + dispersion) / 2)


# ----------------------------------------------------------------------------------------------
# What was measured: the speed of replicas, the sizes of requests.

# Of a step's time, taken to be independent of the batch until batches of several sizes were seen.
_FIXED_SHARE = 0.75
# That assumption weighs as much as batches that vary by this share of their mean.
_PRIOR_SPREAD = 0.1


class StepCost(NamedTuple):
    """Seconds of a decode step: `fixed_s + per_sequence_s * batch`."""

    fixed_s: float
    per_sequence_s: float

    def step_s(self, batch: float) -> float:
        return self.fixed_s + self.per_sequence_s * batch

    def largest_batch(self, limit_s: float, max_sequences: int) -> int:
        """The largest batch whose step stays within `limit_s`; at least 1, at most `max_sequences`."""
        if self.per_sequence_s <= 0:
            return max_sequences if self.fixed_s <= limit_s else 1
        fitting = math.floor((limit_s - self.fixed_s) / self.per_sequence_s + 1e-9)
        return max(1, min(max_sequences, fitting))


class MeasuredRates(NamedTuple):
    """Of the replicas, as measured; None or 0 while nothing was."""

    # Prompt tokens a second that one replica computes while it has some.
    prefill_tok_s: float
    step: StepCost | None
    # The largest at which one decode replica keeps `itl_slo_s`.
    batch: int
    # Of one replica that decodes.
    kv_blocks: float
    blocks_per_sequence: float

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second of one replica at that batch; 0: not known."""
        return self.batch / self.step.step_s(self.batch) if self.step else 0.0


class RequestSizes(NamedTuple):
    """Of the requests."""

    # Tokens to compute of one prompt, cached ones excluded; None: no prompt was reported yet.
    prompt: Moments | None
    # Tokens of one continuation; None: none ended yet.
    output: Moments | None
    sequences_per_request: float


class ArrivalRates(NamedTuple):
    """Requests a second: what to expect, and the least that must still fit after a pool shrank."""

    expected: Forecast
    # The larger of the expected rate and that of the last `down_cool_down_s`.
    lasting_per_s: float


def measured_rates(
    history: History, config: ScalingConfig, max_sequences: int, now: float, has_prefill: bool
) -> MeasuredRates:
    """`max_sequences` is the largest batch that the decode pools' configuration allows."""
    prefilling, decoding = [], []
    for sample in history:
        weight = math.exp(-(now - sample.at) / (config.forecast_s / 2))
        for replica in sample.replicas:
            if not replica.is_known:
                continue
            kind = kind_of(replica.role, has_prefill=has_prefill)
            if kind != DECODE and replica.prefill_tok_s > 0:
                prefilling.append((weight, replica))
            if kind != PREFILL:
                decoding.append((weight, replica))
    step = step_cost(
        (weight, min(each.num_running, max_sequences), each.decode_step_s) for weight, each in decoding
    )
    return MeasuredRates(
        prefill_tok_s=_prefill_tok_s(prefilling),
        step=step,
        batch=step.largest_batch(config.itl_slo_s, max_sequences) if step else max_sequences,
        kv_blocks=_mean((1.0, float(each.num_total_blocks)) for _, each in decoding),
        blocks_per_sequence=_blocks_per_sequence(decoding),
    )


def _prefill_tok_s(samples: Sequence[tuple[float, ReplicaSample]]) -> float:
    """While prompts waited, where they did: a replica with little to do fills its steps less."""
    loaded = [(weight, each) for weight, each in samples if each.num_backlog_tokens > 0]
    return _mean((weight, each.prefill_tok_s) for weight, each in loaded or samples)


def _blocks_per_sequence(samples: Sequence[tuple[float, ReplicaSample]]) -> float:
    """Those in use, landings' included, over the sequences that run or land."""
    busy = [
        (weight * (each.num_total_blocks - each.num_free_blocks), weight * sequences)
        for weight, each in samples
        if (sequences := each.num_running + each.num_landings - each.num_waiting_landings) > 0
    ]
    total = sum(sequences for _, sequences in busy)
    return sum(blocks for blocks, _ in busy) / total if total > 0 else 0.0


def step_cost(points: Iterable[tuple[float, int, float]]) -> StepCost | None:
    """From (weight, batch, step seconds): the line through them, with neither part below 0; None without
    any. The less the batches vary, the more its slope is the assumed one."""
    kept = [point for point in points if point[1] > 0 and point[2] > 0]
    if not kept:
        return None
    weights, batches, seconds = (np.array(column, dtype=np.float64) for column in zip(*kept, strict=True))
    batch = float(np.average(batches, weights=weights))
    step_s = float(np.average(seconds, weights=weights))
    variance = float(np.average((batches - batch) ** 2, weights=weights))
    covariance = float(np.average((batches - batch) * (seconds - step_s), weights=weights))
    prior = (_PRIOR_SPREAD * batch) ** 2
    assumed = (1 - _FIXED_SHARE) * step_s / batch
    slope = min(max((covariance + prior * assumed) / (variance + prior), 0.0), step_s / batch)
    return StepCost(step_s - slope * batch, slope)


def measured_sizes(history: History, now: float, fade_s: float) -> RequestSizes:
    """Over the whole history, recent samples counting more."""
    totals = np.zeros(8)
    for sample in history:
        asked = sample.demand.values()[:8]
        totals += math.exp(-(now - sample.at) / fade_s) * np.array(asked, dtype=np.float64)
    arrived, sequences, prompts, computed, computed_squares, ended, output, output_squares = totals.tolist()
    return RequestSizes(
        prompt=moments(prompts, computed, computed_squares),
        output=moments(ended, output, output_squares),
        sequences_per_request=sequences / arrived if arrived > 0 else 1.0,
    )


def arrivals(samples: Sequence[ScalingSample]) -> list[CountedSpan]:
    """Requests between each sample and the one before."""
    return [
        CountedSpan(sample.at, sample.at - before.at, sample.demand.num_arrived)
        for before, sample in itertools.pairwise(samples)
    ]


def measured_arrivals(history: History, config: ScalingConfig, horizon_s: float, now: float) -> ArrivalRates:
    """`horizon_s`: how far ahead to look, as replicas take that long to start."""
    spans = arrivals(list(history))
    expected = forecast(spans, now, horizon_s, config.forecast_s / 2, config.forecast_s / 10)
    latest = [span for span in spans if span.at > now - config.down_cool_down_s]
    return ArrivalRates(expected, max(expected.per_s, mean_rate(latest)))


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    """0 without any."""
    pairs = list(weighted)
    total = sum(weight for weight, _ in pairs)
    return sum(weight * value for weight, value in pairs) / total if total > 0 else 0.0
