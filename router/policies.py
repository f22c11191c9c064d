"""How candidates get their costs: the default `cost` policy, and plain ones to compare it with.

A policy only prices; `router.cost.choose` then takes the least, so every decision can be recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from router.config import RouterConfig
from router.cost import (
    STALE_TOKENS,
    ReplicaCost,
    RouteQuery,
    decode_candidate,
    local_candidate,
    prefill_candidate,
)
from router.messages import Candidate

_MASK_64 = (1 << 64) - 1


class Policy(Protocol):
    """Prices the options of one request; both lists come least recently chosen first."""

    def candidates(
        self, ask: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        """Candidates of the sides "prefill", "decode" and "local". A decode replica that may only serve
        alone has no "decode" candidate."""


class CostPolicy:
    """The costs of `router.cost`. Skips the prefill pool whenever little is uncached at the decode side."""

    def __init__(self, decode_pressure: float) -> None:
        self._decode_pressure = decode_pressure

    def candidates(
        self, ask: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        priced = [prefill_candidate(ask, option) for option in prefills]
        for option in decodes:
            if not _must_stay(ask, option):
                priced.append(decode_candidate(ask, option, self._decode_pressure))
            if ask.may_stay:
                priced.append(local_candidate(ask, option, self._decode_pressure))
        return priced


# Ranks the options of a side ("prefill" or "decode"): one number each, the least is taken.
Ranker = Callable[[Sequence[ReplicaCost], str], list[float]]


class PlainPolicy:
    """Ranks each side by itself and takes no heed of what a pair or a disturbance costs.

    The prefill pool is used unless it is empty or the chosen decode replica lacks almost nothing; replicas
    of role "both" are never prefill replicas of others here.
    """

    def __init__(self, rank: Ranker) -> None:
        self._rank = rank

    def candidates(
        self, ask: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        if ask.may_stay:
            prefills = [option for option in prefills if option.state.role == "prefill"]
        priced = [
            _plain(ask, option, "prefill", rank)
            for option, rank in zip(prefills, self._rank(prefills, "prefill"), strict=True)
        ]
        best_prefill = min((candidate.cost for candidate in priced), default=0.0)
        for option, rank in zip(decodes, self._rank(decodes, "decode"), strict=True):
            if ask.may_stay and (not prefills or _must_stay(ask, option)):
                priced.append(_plain(ask, option, "local", rank + best_prefill))
            else:
                priced.append(_plain(ask, option, "decode", rank))
        return priced


def make_policy(config: RouterConfig, seed: int) -> Policy:
    """The one place where a policy is chosen by name."""
    if config.policy == "round_robin":
        return PlainPolicy(rank_by_turn)
    if config.policy == "random":
        return PlainPolicy(SeededRandom(seed).rank)
    if config.policy == "least_loaded":
        return PlainPolicy(rank_by_load)
    if config.policy == "longest_prefix":
        return PlainPolicy(rank_by_prefix)
    return CostPolicy(config.decode_pressure)


def rank_by_turn(options: Sequence[ReplicaCost], side: str) -> list[float]:
    """Round robin: options come least recently chosen first."""
    return [float(index) for index in range(len(options))]


class SeededRandom:
    """Ranks from [0, 1), a counter hashed with the seed (splitmix64): the same seed, the same decisions."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK_64

    def rank(self, options: Sequence[ReplicaCost], side: str) -> list[float]:
        return [(self._draw() >> 11) * 2.0**-53 for _ in options]

    def _draw(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK_64
        mixed = ((self._state ^ self._state >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK_64
        return mixed ^ mixed >> 31


def rank_by_load(options: Sequence[ReplicaCost], side: str) -> list[float]:
    """Fewest tokens to compute, or fewest sequences to decode."""
    if side == "prefill":
        return [float(option.state.backlog_tokens) for option in options]
    return [float(option.state.num_sequences) for option in options]


def rank_by_prefix(options: Sequence[ReplicaCost], side: str) -> list[float]:
    """Most of the prompt held, whatever the load."""
    return [-float(option.matched_tokens + option.dram_tokens + option.nvme_tokens) for option in options]


def _must_stay(ask: RouteQuery, option: ReplicaCost) -> bool:
    return ask.may_stay and option.uncached_tokens + option.loading_tokens <= ask.skip_prefill_tokens


def _plain(ask: RouteQuery, option: ReplicaCost, side: str, rank: float) -> Candidate:
    state = option.state
    stale_tokens = STALE_TOKENS if option.is_stale else 0.0
    if side == "decode":
        matched_tokens = option.matched_tokens
        option = ReplicaCost(state, option.is_stale, matched_tokens, ask.num_tokens - matched_tokens)
    return Candidate(
        replica_id=state.replica_id,
        side=side,
        matched_tokens=option.matched_tokens,
        uncached_tokens=option.uncached_tokens,
        backlog_tokens=float(state.backlog_tokens),
        transfer_tokens=0.0,
        pressure_tokens=float(state.num_sequences),
        cost=rank + stale_tokens,
        note="stale load" if option.is_stale else "",
        dram_tokens=option.dram_tokens,
        nvme_tokens=option.nvme_tokens,
        loading_tokens=option.loading_tokens,
    )
