"""Estimators of the slow floor: how much will be asked, and how much room its spread needs. No state.

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

from cluster.scaling.config import ScalingConfig
from cluster.scaling.rates import BOTH, DECODE, PREFILL, Rates, Sizes

TAIL = 0.1
"""The share of requests that may be served worse than what is planned for."""
NORMAL_TAIL = 1.2816
"""How many standard deviations above its mean a normal value lies in that share of cases."""
_MIN_POINTS = 10
_TREND_ERRORS = 3.0
"""A trend counts when it is this many standard errors from none: noise of a steady load is no trend."""
_MIN_BLOCKS = 5
_MAX_DISPERSION = 25.0

_Floats = npt.NDArray[np.float64]


class Spell(NamedTuple):
    """What came in the `length_s` seconds that end at `at`."""

    at: float
    length_s: float
    num: float


class Forecast(NamedTuple):
    """An expected rate and where it comes from."""

    per_s: float
    mean_per_s: float
    """Of the whole history, the recent counting more."""
    trend_per_s2: float
    """0 where the change of the rate cannot be told from noise."""
    dispersion: float
    """Variance of the counts over their mean: 1 for independent arrivals, more for bursts."""


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
    spells: Sequence[Spell], now: float, horizon_s: float, fade_s: float, block_s: float
) -> Forecast:
    """The rate to expect `horizon_s` after `now`: a line through the rates of blocks of `block_s`, weighted
    by length and by exp(-age / `fade_s`), where it rises or falls beyond doubt; else their weighted mean.

    One block of ten that stands out, however far, is no trend: bursts are for the fast loop.
    """
    kept = [spell for spell in spells if spell.length_s > 0]
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


def _blocks(spells: Sequence[Spell], now: float, block_s: float) -> tuple[_Floats, _Floats, _Floats]:
    """Mean age, length and count of each block that has anything, the latest first."""
    sums: dict[int, list[float]] = {}
    for spell in spells:
        age_s = now - spell.at + spell.length_s / 2
        block = sums.setdefault(int(age_s // block_s), [0.0, 0.0, 0.0])
        block[0] += age_s * spell.length_s
        block[1] += spell.length_s
        block[2] += spell.num
    ages, lengths, counts = np.array([sums[number] for number in sorted(sums)]).T
    return ages / lengths, lengths, counts


def mean_rate(spells: Sequence[Spell]) -> float:
    """Per second, all of them counting alike."""
    total_s = sum(spell.length_s for spell in spells)
    return sum(spell.num for spell in spells) / total_s if total_s > 0 else 0.0


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


def _dispersion(spells: Sequence[Spell]) -> float:
    """From differences of neighbours, so that a trend does not count as spread; at least 1."""
    counts = np.array([spell.num for spell in spells], dtype=np.float64)
    lengths = np.array([spell.length_s for spell in spells])
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
# The slow floor: how many replicas the expected demand needs at the measured speed, tails counted.

_KV_SHARE = 0.9
"""Of the KV blocks that may be in use at the 90th percentile: below it nothing waits for room."""


class Need(NamedTuple):
    """How many replicas, and why; None: what it would follow from was not measured yet."""

    num_replicas: int | None
    reason: str


class Load(NamedTuple):
    """Requests a second with their sizes, at the measured speed."""

    per_s: float
    dispersion: float
    sizes: Sizes
    rates: Rates

    def scaled(self, factor: float) -> Load:
        return self._replace(per_s=self.per_s * factor)

    @property
    def service(self) -> Moments | None:
        """Seconds that one prompt takes a replica."""
        prompt, tok_s = self.sizes.prompt, self.rates.prefill_tok_s
        if prompt is None or (prompt.mean > 0 and tok_s <= 0):
            return None
        return Moments(prompt.mean / tok_s if prompt.mean > 0 else 0.0, prompt.variation)

    @property
    def output_tok_s(self) -> float | None:
        output = self.sizes.output
        return None if output is None else self.per_s * self.sizes.sequences_per_request * output.mean

    @property
    def num_sequences(self) -> float | None:
        """That decode at a time, on average, when every step is as long as in the largest batch."""
        if self.output_tok_s is None or self.rates.step is None:
            return None
        return self.output_tok_s * self.rates.step.step_s(self.rates.batch)


def prefill_need(load: Load, config: ScalingConfig) -> Need:
    """Replicas that compute prompts and nothing else."""
    if load.per_s <= 0:
        return Need(1, "no requests")
    service, prompt = load.service, load.sizes.prompt
    if service is None or prompt is None:
        return Need(None, "no prefill rate was measured yet")
    busy = load.per_s * service.mean
    needed = _ceil(busy / config.target_load)
    counted = _with_wait(needed, load, service, busy, config.ttft_slo_s)
    reason = (
        f"{_rate(load.per_s)} requests/s with {prompt.mean:.0f} tokens to compute each, against "
        f"{load.rates.prefill_tok_s:.0f} tok/s a replica at {config.target_load:.0%} load, need {needed}"
    )
    if counted > needed:
        reason += (
            f"; {counted} so that {1 - TAIL:.0%} have their first token within {config.ttft_slo_s:g} s "
            f"although sizes vary (squared variation {service.variation:.1f}, arrivals {load.dispersion:.1f})"
        )
    return Need(counted, reason)


def _with_wait(num_replicas: int, load: Load, service: Moments, busy: float, slo_s: float) -> int:
    """As many more as keep the tail of the wait, and the prompt's own time, within `slo_s`. Where the mean
    prompt alone takes longer no number does, and the load decides."""
    if service.mean >= slo_s:
        return num_replicas
    num_replicas = max(num_replicas, math.floor(busy) + 1)
    while tail_wait_s(load.per_s, service, num_replicas, load.dispersion) + service.mean > slo_s:
        num_replicas += 1
    return num_replicas


def decode_need(load: Load, config: ScalingConfig) -> Need:
    """Replicas that decode and compute no prompts."""
    if load.per_s <= 0:
        return Need(1, "no requests")
    present, output, rates = load.num_sequences, load.sizes.output, load.rates
    if present is None or output is None:
        return Need(None, "no decode step was measured yet")
    crowd = tail_crowd(present, dispersion=load.dispersion)
    by_batch = _ceil(max(present / config.target_load, crowd) / rates.batch)
    by_room = _by_room(load, config)
    if by_room > by_batch:
        return Need(by_room, _room_reason(load, present, by_room))
    each = "one" if rates.batch == 1 else f"batches of {rates.batch}"
    return Need(
        by_batch,
        f"{_rate(load.output_tok_s or 0.0)} tokens/s ({_rate(load.per_s)} requests/s with {output.mean:.0f} "
        f"tokens), against {rates.decode_tok_s:.0f} tok/s a replica in {each} within {config.itl_slo_s:g} s "
        f"a step at {config.target_load:.0%} load, need {by_batch}",
    )


def _by_room(load: Load, config: ScalingConfig) -> int:
    """What the KV of all sequences needs; 1 while their size is not known."""
    present, output, rates = load.num_sequences, load.sizes.output, load.rates
    if present is None or output is None or rates.kv_blocks <= 0:
        return 1
    crowd = tail_crowd(present, output.variation, load.dispersion)
    sequences = max(present / config.target_load, crowd / _KV_SHARE)
    return _ceil(sequences * rates.blocks_per_sequence / rates.kv_blocks)


def _room_reason(load: Load, present: float, needed: int) -> str:
    output = load.sizes.output
    variation = output.variation if output else 0.0
    return (
        f"{_rate(present)} sequences at a time with {load.rates.blocks_per_sequence:.0f} KV blocks each "
        f"(squared variation of outputs {variation:.1f}), against {load.rates.kv_blocks:.0f} blocks a "
        f"replica, need {needed}"
    )


def both_need(prefill: Load, decode: Load, config: ScalingConfig) -> Need:
    """Replicas that do both: the time that prompts take and the time that steps take add up."""
    if prefill.per_s <= 0 and decode.per_s <= 0:
        return Need(1, "no requests")
    service, present = prefill.service, decode.num_sequences
    if service is None or present is None:
        return Need(None, "neither a prefill rate nor a decode step was measured yet")
    prompts, steps = prefill.per_s * service.mean, present / decode.rates.batch
    by_room = _by_room(decode, config)
    needed = _ceil((prompts + steps) / config.target_load)
    if by_room > needed:
        return Need(by_room, _room_reason(decode, present, by_room))
    return Need(
        needed,
        f"{_rate(prefill.per_s)} requests/s keep {prompts:.1f} replicas busy with prompts and {steps:.1f} "
        f"with steps; at {config.target_load:.0%} load they need {needed}",
    )


def floors(load: Load, config: ScalingConfig, reach: dict[str, int]) -> dict[str, Need]:
    """By kind, for the kinds in `reach`, which says how many replicas each may have at most. What dedicated
    pools cannot serve at their limits is left to those that do both."""
    needs = {}
    shares = {}
    for kind, needed in ((PREFILL, prefill_need), (DECODE, decode_need)):
        shares[kind] = 1.0
        if kind in reach:
            needs[kind] = needed(load, config)
            wanted = needs[kind].num_replicas
            shares[kind] = 0.0 if wanted is None else 1 - min(1.0, reach[kind] / wanted)
    if BOTH in reach:
        needs[BOTH] = both_need(load.scaled(shares[PREFILL]), load.scaled(shares[DECODE]), config)
    return needs


def _ceil(value: float) -> int:
    """At least 1; what is above a whole number by rounding alone does not count."""
    return max(1, math.ceil(value - 1e-9))


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
