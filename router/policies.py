"""Give candidates their costs: the default `cost` policy, and plain policies to compare it with.

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
    """Prices the replicas of one request. Both lists come least recently chosen first."""

    def candidates(
        self, query: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        """Return candidates for the sides "prefill", "decode" and "local". A decode replica that may only
        serve alone gets no "decode" candidate."""


class CostPolicy:
    """The costs of `router.cost`. Skips the prefill pool whenever little is uncached at the decode side."""

    def __init__(self, decode_pressure: float) -> None:
        self._decode_pressure = decode_pressure

    def candidates(
        self, query: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        priced = [prefill_candidate(query, replica) for replica in prefills]
        for replica in decodes:
            if not _must_stay(query, replica):
                priced.append(decode_candidate(query, replica, self._decode_pressure))
            if query.may_stay:
                priced.append(local_candidate(query, replica, self._decode_pressure))
        return priced


# Ranks the replicas of a side ("prefill" or "decode"): one number each, the least wins.
Ranker = Callable[[Sequence[ReplicaCost], str], list[float]]


class PlainPolicy:
    """Ranks each side by itself, regardless of what a pair or a disturbance costs.

    The prefill pool is used unless it is empty or the chosen decode replica lacks almost nothing. Replicas of
    role "both" never prefill for others here.
    """

    def __init__(self, rank: Ranker) -> None:
        self._rank = rank

    def candidates(
        self, query: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        if query.may_stay:
            prefills = [replica for replica in prefills if replica.state.role == "prefill"]
        priced = [
            _plain(query, replica, "prefill", rank)
            for replica, rank in zip(prefills, self._rank(prefills, "prefill"), strict=True)
        ]
        best_prefill = min((candidate.cost for candidate in priced), default=0.0)
        for replica, rank in zip(decodes, self._rank(decodes, "decode"), strict=True):
            if query.may_stay and (not prefills or _must_stay(query, replica)):
                priced.append(_plain(query, replica, "local", rank + best_prefill))
            else:
                priced.append(_plain(query, replica, "decode", rank))
        return priced


def make_policy(config: RouterConfig, seed: int) -> Policy:
    """Make the configured policy."""
    if config.policy == "round_robin":
        return PlainPolicy(rank_by_turn)
    if config.policy == "random":
        return PlainPolicy(SeededRandom(seed).rank)
    if config.policy == "least_loaded":
        return PlainPolicy(rank_by_load)
    if config.policy == "longest_prefix":
        return PlainPolicy(rank_by_prefix)
    return CostPolicy(config.decode_pressure)


def rank_by_turn(replicas: Sequence[ReplicaCost], side: str) -> list[float]:
    """Rank by turn (round robin): replicas come least recently chosen first."""
    return [float(index) for index in range(len(replicas))]


class SeededRandom:
    """Draws ranks from [0, 1) by hashing a counter with the seed (splitmix64): equal seeds, equal
    decisions."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK_64

    def rank(self, replicas: Sequence[ReplicaCost], side: str) -> list[float]:
        return [(self._draw() >> 11) * 2.0**-53 for _ in replicas]

    def _draw(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK_64
        mixed = ((self._state ^ self._state >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK_64
        return mixed ^ mixed >> 31


def rank_by_load(replicas: Sequence[ReplicaCost], side: str) -> list[float]:
    """Prefer the fewest tokens to compute, or the fewest sequences to decode."""
    if side == "prefill":
        return [float(replica.state.backlog_tokens) for replica in replicas]
    return [float(replica.state.num_sequences) for replica in replicas]


def rank_by_prefix(replicas: Sequence[ReplicaCost], side: str) -> list[float]:
    """Prefer the replica that holds most of the prompt, whatever its load."""
    return [
        -float(replica.matched_tokens + replica.dram_tokens + replica.nvme_tokens) for replica in replicas
    ]


def _must_stay(query: RouteQuery, replica: ReplicaCost) -> bool:
    return query.may_stay and replica.uncached_tokens + replica.loading_tokens <= query.skip_prefill_tokens


def _plain(query: RouteQuery, replica: ReplicaCost, side: str, rank: float) -> Candidate:
    state = replica.state
    stale_tokens = STALE_TOKENS if replica.is_stale else 0.0
    if side == "decode":
        matched_tokens = replica.matched_tokens
        replica = ReplicaCost(state, replica.is_stale, matched_tokens, query.num_tokens - matched_tokens)
    return Candidate(
        replica_id=state.report.identity.replica_id,
        side=side,
        matched_tokens=replica.matched_tokens,
        uncached_tokens=replica.uncached_tokens,
        backlog_tokens=float(state.backlog_tokens),
        transfer_tokens=0.0,
        pressure_tokens=float(state.num_sequences),
        cost=rank + stale_tokens,
        note="stale load" if replica.is_stale else "",
        dram_tokens=replica.dram_tokens,
        nvme_tokens=replica.nvme_tokens,
        loading_tokens=replica.loading_tokens,
    )
