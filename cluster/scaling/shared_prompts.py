"""Counts where decode replicas compute prompts, too, because their engines keep an objective for the time of
output tokens meanwhile (`engine.tpot_objective_s`, priced in `router.rates`).

A step may take as long as the objective. What its sequences take of that, n x `per_sequence_s`, is decoding,
and the rest is left to prompts. So D decode replicas do the work of

    D - present x per_sequence_s / objective

prefill replicas, and one more of either role adds one. More decode replicas are worth more, since they serve
prompts and longer answers alike: the prefill pool has what its limits ask for, and the decode pool the rest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cluster.scaling.config import ScalingConfig
from cluster.scaling.forecast_replicas import ExpectedLoad, ReplicaNeed, servers_in_time
from cluster.scaling.samples import DECODE, PREFILL


class PromptShares(NamedTuple):
    """How few replicas the prefill pools may have, and how many the decode pools may have."""

    least_prefill: int
    most_decode: int


def shared_needs(
    load: ExpectedLoad, config: ScalingConfig, separate: dict[str, ReplicaNeed], shares: PromptShares
) -> dict[str, ReplicaNeed]:
    """Return the needs of both kinds where they share the prompts; `separate` are those where they do not,
    which stay where a prompt would take too long beside other sequences, or too little was measured."""
    service, decode = load.service, separate[DECODE].num_replicas
    decoding = decoding_replicas(load, config)
    if load.per_s <= 0 or service is None or decode is None or decoding is None:
        return separate
    # A replica with as many sequences as are planned leaves this part of its time to prompts.
    least_share = 1 - decoding / decode
    if least_share <= 0 or service.mean / least_share > config.ttft_slo_s:
        return separate
    busy = load.per_s * service.mean
    total = math.ceil((busy + decoding) / config.target_load - 1e-9)
    num_servers = servers_in_time(max(1, math.floor(total - decoding)), load, service, config.ttft_slo_s)
    total = max(total, num_servers + math.floor(decoding))
    num_decode = max(decode, min(total - shares.least_prefill, shares.most_decode))
    num_prefill = max(shares.least_prefill, total - num_decode)
    tokens = load.sizes.prompt.mean if load.sizes.prompt else 0.0
    speed = f"{tokens:.0f} tokens to compute each, against {load.rates.prefill_tok_s:.0f} tok/s a replica"
    reason = (
        f"{total}, as decode replicas compute prompts, too: {load.per_s:.3g} requests/s with {speed}, take "
        f"{busy:.1f} replicas, and decoding {decoding:.1f}; at {config.target_load:.0%} load"
    )
    needs = {PREFILL: ReplicaNeed(num_prefill, f"{num_prefill} of {reason}"), DECODE: separate[DECODE]}
    if num_decode > decode:
        needs[DECODE] = ReplicaNeed(num_decode, f"{num_decode} of {reason}")
    return needs


def decoding_replicas(load: ExpectedLoad, config: ScalingConfig) -> float | None:
    """Return how many replicas' time decoding takes, when steps are as long as the objective; None: no step
    was measured."""
    present, step = load.num_sequences, load.rates.step
    return None if present is None or step is None else present * step.per_sequence_s / config.itl_slo_s
