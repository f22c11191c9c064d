"""Forecasts how many replicas the expected demand needs at the measured speed, tails included."""

from __future__ import annotations

import math
from typing import NamedTuple

from cluster.scaling.config import ScalingConfig
from cluster.scaling.forecast import TAIL, Moments, tail_crowd, tail_wait_s
from cluster.scaling.measured_rates import MeasuredRates, RequestSizes
from cluster.scaling.samples import BOTH, DECODE, PREFILL

# The share of the KV blocks that may be in use at the 90th percentile: below it nothing waits for blocks.
_KV_SHARE = 0.9


class ReplicaNeed(NamedTuple):
    """The number of replicas, and the reason; None: the values that it would follow from were not measured
    yet."""

    num_replicas: int | None
    reason: str


class ExpectedLoad(NamedTuple):
    """Requests a second with their sizes, at the measured speed."""

    per_s: float
    dispersion: float
    sizes: RequestSizes
    rates: MeasuredRates

    def scaled(self, factor: float) -> ExpectedLoad:
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
        """The sequences that decode at a time, on average, when every step is as long as in the largest
        batch."""
        if self.output_tok_s is None or self.rates.step is None:
            return None
        return self.output_tok_s * self.rates.step.step_s(self.rates.batch)


def prefill_need(load: ExpectedLoad, config: ScalingConfig) -> ReplicaNeed:
    """Return the need of replicas that compute prompts and nothing else."""
    if load.per_s <= 0:
        return ReplicaNeed(1, "no requests")
    service, prompt = load.service, load.sizes.prompt
    if service is None or prompt is None:
        return ReplicaNeed(None, "no prefill rate was measured yet")
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
    return ReplicaNeed(counted, reason)


def _with_wait(num_replicas: int, load: ExpectedLoad, service: Moments, busy: float, slo_s: float) -> int:
    """As many more as keep the tail of the wait, and the prompt's own time, within `slo_s`. Where the mean
    prompt alone takes longer no number does, and the load decides."""
    if service.mean >= slo_s:
        return num_replicas
    return servers_in_time(max(num_replicas, math.floor(busy) + 1), load, service, slo_s)


def servers_in_time(num_servers: int, load: ExpectedLoad, service: Moments, slo_s: float) -> int:
    """Return so many servers, or as many more as keep the tail of the wait, and the prompt's own time, within
    `slo_s`. The mean prompt takes less."""
    while tail_wait_s(load.per_s, service, num_servers, load.dispersion) + service.mean > slo_s:
        num_servers += 1
    return num_servers


def decode_need(load: ExpectedLoad, config: ScalingConfig) -> ReplicaNeed:
    """Return the need of replicas that decode and compute no prompts."""
    if load.per_s <= 0:
        return ReplicaNeed(1, "no requests")
    present, output, rates = load.num_sequences, load.sizes.output, load.rates
    if present is None or output is None:
        return ReplicaNeed(None, "no decode step was measured yet")
    crowd = tail_crowd(present, dispersion=load.dispersion)
    by_batch = _ceil(max(present / config.target_load, crowd) / rates.batch)
    by_kv_blocks = _by_kv_blocks(load, config)
    if by_kv_blocks > by_batch:
        return ReplicaNeed(by_kv_blocks, _kv_reason(load, present, by_kv_blocks))
    each = "one" if rates.batch == 1 else f"batches of {rates.batch}"
    return ReplicaNeed(
        by_batch,
        f"{_rate(load.output_tok_s or 0.0)} tokens/s ({_rate(load.per_s)} requests/s with {output.mean:.0f} "
        f"tokens), against {rates.decode_tok_s:.0f} tok/s a replica in {each} within {config.itl_slo_s:g} s "
        f"a step at {config.target_load:.0%} load, need {by_batch}",
    )


def _by_kv_blocks(load: ExpectedLoad, config: ScalingConfig) -> int:
    """Return the number of replicas that the KV of all sequences needs; 1 while their size is not known."""
    present, output, rates = load.num_sequences, load.sizes.output, load.rates
    if present is None or output is None or rates.kv_blocks <= 0:
        return 1
    crowd = tail_crowd(present, output.variation, load.dispersion)
    sequences = max(present / config.target_load, crowd / _KV_SHARE)
    return _ceil(sequences * rates.blocks_per_sequence / rates.kv_blocks)


def _kv_reason(load: ExpectedLoad, present: float, needed: int) -> str:
    output = load.sizes.output
    variation = output.variation if output else 0.0
    return (
        f"{_rate(present)} sequences at a time with {load.rates.blocks_per_sequence:.0f} KV blocks each "
        f"(squared variation of outputs {variation:.1f}), against {load.rates.kv_blocks:.0f} blocks a "
        f"replica, need {needed}"
    )


def both_need(prefill: ExpectedLoad, decode: ExpectedLoad, config: ScalingConfig) -> ReplicaNeed:
    """Return the need of replicas that do both: the time that prompts take and the time that steps take add
    up."""
    if prefill.per_s <= 0 and decode.per_s <= 0:
        return ReplicaNeed(1, "no requests")
    service, present = prefill.service, decode.num_sequences
    if service is None or present is None:
        return ReplicaNeed(None, "neither a prefill rate nor a decode step was measured yet")
    prompts, steps = prefill.per_s * service.mean, present / decode.rates.batch
    by_kv_blocks = _by_kv_blocks(decode, config)
    needed = _ceil((prompts + steps) / config.target_load)
    if by_kv_blocks > needed:
        return ReplicaNeed(by_kv_blocks, _kv_reason(decode, present, by_kv_blocks))
    return ReplicaNeed(
        needed,
        f"{_rate(prefill.per_s)} requests/s keep {prompts:.1f} replicas busy with prompts and {steps:.1f} "
        f"with steps; at {config.target_load:.0%} load they need {needed}",
    )


def forecast_replicas(
    load: ExpectedLoad, config: ScalingConfig, reach: dict[str, int]
) -> dict[str, ReplicaNeed]:
    """Return the needs by kind, for the kinds in `reach`, which gives the largest number of replicas of each.
    The demand that dedicated pools cannot serve at their limits is left to replicas that do both."""
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
    """Round up, at least to 1; an excess over a whole number by rounding alone does not count."""
    return max(1, math.ceil(value - 1e-9))


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
