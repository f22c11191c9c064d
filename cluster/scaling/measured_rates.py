"""Measure the speed of replicas, the sizes of requests and the rate of their arrivals, from samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.scaling.config import ScalingConfig
from cluster.scaling.forecast import CountedSpan, Forecast, Moments, forecast, mean_rate, moments
from cluster.scaling.samples import (
    DECODE,
    PREFILL,
    History,
    ReplicaSample,
    ScalingSample,
    kind_of,
)
from kvtransfer.common.moving_average import kept_share

# The share of a step's time that is taken to be independent of the batch until batches of several sizes were
# seen.
_FIXED_SHARE = 0.75
# That assumption weighs as much as batches that vary by this share of their mean.
_PRIOR_SPREAD = 0.1
# Sizes have changed where the means of so many requests or more, before and after, differ by so many standard
# errors: with one request a sample and lognormal lengths (sigma 0.8) that do not change, in one decision of a
# thousand. The change is looked for at every fifth sample.
_CHANGE_REQUESTS = 20
_CHANGE_ERRORS = 4.0
_CHANGE_SAMPLES = 5

_Floats = npt.NDArray[np.float64]


class StepCost(NamedTuple):
    """Seconds of a decode step: `fixed_s + per_sequence_s * batch`."""

    fixed_s: float
    per_sequence_s: float

    def step_s(self, batch: float) -> float:
        return self.fixed_s + self.per_sequence_s * batch

    def largest_batch(self, limit_s: float, max_sequences: int) -> int:
        """Return the largest batch whose step stays within `limit_s`; at least 1, at most `max_sequences`."""
        if self.per_sequence_s <= 0:
            return max_sequences if self.fixed_s <= limit_s else 1
        fitting = math.floor((limit_s - self.fixed_s) / self.per_sequence_s + 1e-9)
        return max(1, min(max_sequences, fitting))


class MeasuredRates(NamedTuple):
    """The measured rates of the replicas; None or 0 while nothing was measured."""

    # Prompt tokens a second that one replica computes while it has some.
    prefill_tok_s: float
    step: StepCost | None
    # The largest batch at which one decode replica keeps `itl_slo_s`.
    batch: int
    # The blocks of one replica that decodes.
    kv_blocks: float
    blocks_per_sequence: float

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second of one replica at that batch; 0: not known."""
        return self.batch / self.step.step_s(self.batch) if self.step else 0.0


class RequestSizes(NamedTuple):
    """The sizes of the requests."""

    # Tokens to compute of one prompt, cached ones excluded; None: no prompt was reported yet.
    prompt: Moments | None
    # Tokens of one continuation; None: none ended yet.
    output: Moments | None
    sequences_per_request: float


class ArrivalRates(NamedTuple):
    """Requests a second: the expected rate, and the least that must still fit after a pool shrank."""

    expected: Forecast
    # The larger of the expected rate and that of the last `down_cool_down_s`.
    lasting_per_s: float


def measured_rates(
    history: History, config: ScalingConfig, max_sequences: int, now: float, has_prefill: bool
) -> MeasuredRates:
    """Return the measured rates; `max_sequences` is the largest batch that the decode pools' configuration
    allows."""
    prefilling, decoding = [], []
    for sample in history:
        weight = kept_share(now - sample.at, config.forecast_s / 2)
        for replica in sample.replicas:
            if not replica.is_known:
                continue
            kind = kind_of(replica.role, has_prefill=has_prefill)
            if kind != DECODE and replica.prefill_tok_s > 0:
                prefilling.append((weight, replica))
            if kind != PREFILL:
                decoding.append((weight, replica))
    step = reported_step(decoding) or step_cost(
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
    """Return the prefill rate while prompts waited, where they did: a replica with little to do fills its
    steps less."""
    loaded = [(weight, each) for weight, each in samples if each.num_backlog_tokens > 0]
    return _mean((weight, each.prefill_tok_s) for weight, each in loaded or samples)


def _blocks_per_sequence(samples: Sequence[tuple[float, ReplicaSample]]) -> float:
    """Return the blocks in use, including those of landings, over the sequences that run or land."""
    busy = [
        (weight * (each.num_total_blocks - each.num_free_blocks), weight * sequences)
        for weight, each in samples
        if (sequences := each.num_running + each.num_landings - each.num_waiting_landings) > 0
    ]
    total = sum(sequences for _, sequences in busy)
    return sum(blocks for blocks, _ in busy) / total if total > 0 else 0.0


def reported_step(samples: Sequence[tuple[float, ReplicaSample]]) -> StepCost | None:
    """Return the cost that replicas have measured of their own steps, for contexts as they are; None where
    none has.

    A line through samples is flatter than the truth: a sample has the batch of one moment, and the mean time
    of the steps before it.
    """
    known = [(weight, each) for weight, each in samples if each.decode_base_s > 0]
    num_sequences = sum(weight * each.num_running for weight, each in known)
    if num_sequences <= 0:
        return None
    context = sum(weight * each.num_context_tokens for weight, each in known) / num_sequences
    context_s = _mean((weight, each.decode_context_s) for weight, each in known)
    per_sequence_s = _mean((weight, each.decode_sequence_s) for weight, each in known) + context * context_s
    if per_sequence_s <= 0:
        return None
    return StepCost(_mean((weight, each.decode_base_s) for weight, each in known), per_sequence_s)


def step_cost(points: Iterable[tuple[float, int, float]]) -> StepCost | None:
    """Return the line through points of (weight, batch, step seconds), with neither part below 0; None
    without any. The less the batches vary, the more the slope is the assumed one."""
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


def measured_sizes(
    history: History, now: float, fade_s: float, change_before: float = math.inf
) -> RequestSizes:
    """Return the sizes of requests since they last changed beyond chance, in which recent samples count more.
    A change after `change_before` does not count."""
    if not len(history):
        return RequestSizes(None, None, 1.0)
    asked = np.array([sample.demand.values()[:8] for sample in history], dtype=np.float64)
    weights = np.array([kept_share(now - sample.at, fade_s) for sample in history])
    num_old = sum(sample.at <= change_before for sample in history)
    arrived, sequences = (weights @ asked[:, :2]).tolist()
    return RequestSizes(
        prompt=_moments_since_change(asked[:, 2:5], weights, num_old),
        output=_moments_since_change(asked[:, 5:8], weights, num_old),
        sequences_per_request=sequences / arrived if arrived > 0 else 1.0,
    )


def _moments_since_change(asked: _Floats, weights: _Floats, num_old: int) -> Moments | None:
    """Return the moments of what was asked for since the latest change of its mean, which is looked for among
    the `num_old` oldest samples. `asked` has the count, the sum and the sum of squares of each sample:
    [num_samples, 3]."""
    begin = _latest_change(asked, num_old)
    return moments(*(weights[begin:] @ asked[begin:]).tolist())


def _latest_change(asked: _Floats, num_old: int) -> int:
    """Return the first sample after the latest change of the mean, 0 without any: the values from there on
    and all before them have means that differ by many standard errors. Both are taken to be spread as the
    more uneven ones are: few values often lack the long ones."""
    after = np.cumsum(asked[::-1], axis=0)[::-1]
    for begin in range(len(asked) - _CHANGE_SAMPLES, 0, -_CHANGE_SAMPLES):
        if begin >= num_old:
            continue
        new, old = after[begin], after[0] - after[begin]
        if min(new[0], old[0]) < _CHANGE_REQUESTS:
            continue
        found = [each for each in (moments(*new), moments(*old)) if each is not None]
        variation = max(each.variation for each in found)
        variance = variation * (found[0].mean ** 2 / new[0] + found[1].mean ** 2 / old[0])
        if abs(found[0].mean - found[1].mean) > _CHANGE_ERRORS * math.sqrt(variance):
            return begin
    return 0


def larger_sizes(sizes: RequestSizes, others: RequestSizes) -> RequestSizes:
    """Return of prompts and of outputs the larger."""

    def larger(one: Moments | None, other: Moments | None) -> Moments | None:
        return max(filter(None, (one, other)), key=lambda each: each.mean, default=None)

    return sizes._replace(
        prompt=larger(sizes.prompt, others.prompt), output=larger(sizes.output, others.output)
    )


def arrivals(samples: Sequence[ScalingSample]) -> list[CountedSpan]:
    """Return the requests between each sample and the one before."""
    return [
        CountedSpan(sample.at, sample.at - before.at, sample.demand.num_arrived)
        for before, sample in itertools.pairwise(samples)
    ]


def measured_arrivals(history: History, config: ScalingConfig, horizon_s: float, now: float) -> ArrivalRates:
    """Return the measured rates of arrivals. `horizon_s`: how far ahead to look, as replicas take that time
    to start."""
    spans = arrivals(list(history))
    expected = forecast(spans, now, horizon_s, config.forecast_s / 2, config.forecast_s / 10)
    latest = [span for span in spans if span.at > now - config.down_cool_down_s]
    return ArrivalRates(expected, max(expected.per_s, mean_rate(latest)))


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the weighted mean; 0 without any values."""
    pairs = list(weighted)
    total = sum(weight for weight, _ in pairs)
    return sum(weight * value for weight, value in pairs) / total if total > 0 else 0.0
