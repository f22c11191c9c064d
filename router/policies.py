"""Price each choice in tokens: pure functions from load and matches to candidates, and to the cheapest
choice.

One unit is the delay of computing one prompt token on a prefill replica. All delays that a choice causes are
added: those of the request itself, of later requests, and of the streams that it disturbs.

    prefill p         uncached(p) + loading(p) + backlog(p) + work(p) + disturbance(p)
    decode d          pressure x sequences(d) + no space(d)
    pair p, d         prefill p + decode d + uncached(d) x prefill rate(p) / transfer rate(p)
    local d           prefill d + decode d

*Loading*: a token of the prefix that the store of the replica's node holds is loaded instead of computed, in
the time its tier takes: min(1, prefill rate / load rate) tokens. Loading delays no other request: other work
runs meanwhile. A token that would take as long to load as to compute is computed, and counts as uncached. At
the decode side of a pair only the device counts: the prefill side sends what only the store holds all the
same.

*Work*: a part of the uncached tokens once more. For the request itself, queueing behind a sibling that
computes the prefix is no better than computing it again on an idle replica; for all others it is.

*Disturbance*: computing u tokens takes u / prefill rate. Each of the n streams of the replica waits that
long, which is u tokens of delay each. A wait that is a small part of a decode step goes unnoticed, so it
counts by that part: n x u x min(1, u / prefill rate / decode step). Prefill replicas have no streams. On a
replica of the decode role one more stream is counted: its capacity is reserved for streams, and the next is
due.

Plain policies use the same candidates with costs of their own, so every decision is an argmin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from router.config import RouterConfig
from router.load import CurrentLoad
from router.messages import Candidate, Decision

# Assumed for a replica that has not measured its prefill rate.
DEFAULT_PREFILL_TOK_S = 10_000.0
# Assumed for a replica that has not measured its decode step.
DEFAULT_DECODE_STEP_S = 0.03
# Cost of loading a token over computing it, by tier, assumed until the replica has measured both.
DEFAULT_LOAD_RATIO = {"dram": 0.1, "nvme": 0.5}
# Cost of sending a token over computing it, assumed until the prefill replica has measured both.
DEFAULT_TRANSFER_RATIO = 0.1
# The part of the uncached tokens that counts as delay of later requests. Chosen on a public conversation
# trace (16 nodes): 0.2 has the least mean TTFT at 100 % load and costs under 1 % of it at 50 %; 1.0 has more
# hits.
WORK_PART = 0.2
# Added when the prompt and its growth do not fit the free blocks now (plus the missing tokens).
NO_SPACE_TOKENS = 1e6
# Added for each side whose load is unknown or stale: the replica becomes the last choice.
STALE_TOKENS = 1e9
# Added when the prompt would not fit the device even if it were empty, for a prefill replica and for the
# decode side of a pair. A replica that serves alone may keep the rest in host memory, as much as it reported.
NEVER_FITS_TOKENS = 1e12


class RouteQuery(NamedTuple):
    """What a request needs. `num_growth_tokens` is the most that all its samples together may produce."""

    num_tokens: int
    num_growth_tokens: int
    num_samples: int
    block_tokens: int
    skip_prefill_tokens: int
    # False when a prefill replica is pinned: then no replica serves the request alone.
    may_stay: bool
    # Of each replica's blocks: what its sharing group may use.
    kv_share: float = 1.0


class ReplicaCost(NamedTuple):
    """A replica that may be chosen: its load, how many leading prompt tokens its device holds, how many it
    would compute, and how many in between it would load from which tier of its node's store, at what cost."""

    state: CurrentLoad
    is_stale: bool
    matched_tokens: int
    uncached_tokens: int
    dram_tokens: int = 0
    nvme_tokens: int = 0
    loading_tokens: float = 0.0


class Choice(NamedTuple):
    """The cheapest choice. `prefill` "" means that the decode replica prefills by itself. A cost is `inf`
    where no such choice exists."""

    prefill: str
    decode: str
    pair_cost: float
    local_cost: float


def disturbance_tokens(state: CurrentLoad, uncached_tokens: int) -> float:
    """Return the delay of the replica's streams if it computes that many tokens (formula above)."""
    if state.role == "prefill":
        return 0.0
    num_streams = state.num_sequences + (1 if state.role == "decode" else 0)
    prefill_tok_s = state.report.prefill_tok_s or DEFAULT_PREFILL_TOK_S
    decode_step_s = state.report.decode_step_s or DEFAULT_DECODE_STEP_S
    return num_streams * uncached_tokens * min(1.0, uncached_tokens / prefill_tok_s / decode_step_s)


def replica_cost(
    query: RouteQuery, state: CurrentLoad, is_stale: bool, device: int, dram: int, nvme: int
) -> ReplicaCost:
    """Price a replica with `device` leading blocks of the prompt on its device, and after them `dram` and
    `nvme` blocks in its node's store. At least one token must be computed, whatever is held."""
    matched_tokens = min(device * query.block_tokens, query.num_tokens - 1)
    rest_tokens = query.num_tokens - matched_tokens
    if not dram and not nvme:
        return ReplicaCost(state, is_stale, matched_tokens, rest_tokens)
    dram_ratio, nvme_ratio = load_ratio(state, "dram"), load_ratio(state, "nvme")
    dram_tokens = min(dram * query.block_tokens, rest_tokens - 1) if dram_ratio < 1.0 else 0
    nvme_tokens = min(nvme * query.block_tokens, rest_tokens - 1 - dram_tokens) if nvme_ratio < 1.0 else 0
    return ReplicaCost(
        state,
        is_stale,
        matched_tokens,
        uncached_tokens=rest_tokens - dram_tokens - nvme_tokens,
        dram_tokens=dram_tokens,
        nvme_tokens=nvme_tokens,
        loading_tokens=dram_tokens * dram_ratio + nvme_tokens * nvme_ratio,
    )


def load_ratio(state: CurrentLoad, tier: str) -> float:
    """Return the time to load one token from this tier of the node's store, over the time to compute it."""
    load_tok_s = state.report.load_tok_s.get(tier, 0.0)
    if not state.report.prefill_tok_s or not load_tok_s:
        return DEFAULT_LOAD_RATIO[tier]
    return min(1.0, state.report.prefill_tok_s / load_tok_s)


def transfer_ratio(state: CurrentLoad) -> float:
    """Return the time to send one token from this prefill replica, over the time to compute it there."""
    if not state.report.prefill_tok_s or not state.report.transfer_tok_s:
        return DEFAULT_TRANSFER_RATIO
    return state.report.prefill_tok_s / state.report.transfer_tok_s


def space_penalty_tokens(query: RouteQuery, replica: ReplicaCost) -> float:
    """Return 0 if prompt and growth fit the decode replica's free blocks; else a large penalty that grows
    with the number of missing blocks. Before any report the free blocks are unknown and taken to be
    enough."""
    state = replica.state
    if not state.report.num_total_blocks:
        return 0.0
    needed_tokens = query.num_tokens - replica.matched_tokens + query.num_growth_tokens
    missing = -(-needed_tokens // query.block_tokens) - state.num_free_blocks
    return 0.0 if missing <= 0 else NO_SPACE_TOKENS + missing * query.block_tokens


def never_fits(query: RouteQuery, state: CurrentLoad) -> bool:
    """Whether the prompt exceeds all of the replica's device memory, or its group's share of it, as far as
    that is known."""
    num_blocks = state.report.num_total_blocks
    return num_blocks > 0 and int(num_blocks * query.kv_share) * query.block_tokens <= query.num_tokens


def prefill_candidate(query: RouteQuery, replica: ReplicaCost) -> Candidate:
    """Price the replica as the prefill side of a pair."""
    state = replica.state
    pressure = WORK_PART * replica.uncached_tokens + disturbance_tokens(state, replica.uncached_tokens)
    notes = []
    if never_fits(query, state):
        pressure += NEVER_FITS_TOKENS
        notes.append("never fits")
    if replica.is_stale:
        pressure += STALE_TOKENS
        notes.append("stale load")
    transfer_tokens = query.num_tokens * transfer_ratio(state)
    return _computing("prefill", replica, pressure, ", ".join(notes), transfer_tokens)


def decode_candidate(query: RouteQuery, replica: ReplicaCost, decode_pressure: float) -> Candidate:
    """Price the replica as the decode side of a pair, which is sent whatever its device does not hold."""
    pressure, note = _decode_pressure(query, replica, decode_pressure)
    if never_fits(query, replica.state):
        pressure += NEVER_FITS_TOKENS
        note = f"never fits, {note}" if note else "never fits"
    return Candidate(
        replica_id=replica.state.report.identity.replica_id,
        side="decode",
        matched_tokens=replica.matched_tokens,
        uncached_tokens=query.num_tokens - replica.matched_tokens,
        backlog_tokens=0.0,
        transfer_tokens=0.0,
        pressure_tokens=pressure,
        cost=pressure,
        note=note,
    )


def local_candidate(query: RouteQuery, replica: ReplicaCost, decode_pressure: float) -> Candidate:
    """Price the replica as one that prefills and decodes the request by itself."""
    state, uncached = replica.state, replica.uncached_tokens
    pressure, note = _decode_pressure(query, replica, decode_pressure)
    disturbance = disturbance_tokens(state, uncached)
    pressure += WORK_PART * uncached + disturbance
    exceeds_share = query.kv_share < 1 and never_fits(query, state)
    if exceeds_share or 0 < state.report.max_local_tokens <= query.num_tokens:
        pressure += NEVER_FITS_TOKENS
        note = f"never fits, {note}" if note else "never fits"
    if replica.is_stale:  # once for each side, as for a pair: with all loads stale, the rest decides
        pressure += STALE_TOKENS
    if disturbance:
        note = f"{note}; disturbs by {disturbance:.0f}" if note else f"disturbs by {disturbance:.0f}"
    return _computing("local", replica, pressure, note, 0.0)


def choose(candidates: list[Candidate]) -> Choice | None:
    """Return the cheapest choice: a pair of two different replicas, or a local candidate, which wins a tie.

    Other ties go to the first prefill, then the first decode candidate. None if nothing can be chosen.
    """
    prefills = [item for item in candidates if item.side == "prefill"]
    decodes = [item for item in candidates if item.side == "decode"]
    local = min((item for item in candidates if item.side == "local"), key=_cost, default=None)
    local_cost = float("inf") if local is None else local.cost
    pair_cost, prefill_id, decode_id = float("inf"), "", ""
    if prefills and decodes:
        costs = np.array([item.cost for item in prefills])[:, None] + np.array(
            [item.cost for item in decodes]
        )
        num_tokens = decodes[0].matched_tokens + decodes[0].uncached_tokens
        lacking = np.array([item.uncached_tokens / num_tokens for item in decodes])
        costs += np.array([item.transfer_tokens for item in prefills])[:, None] * lacking
        decode_rows = {item.replica_id: row for row, item in enumerate(decodes)}
        for row, item in enumerate(prefills):
            if (same := decode_rows.get(item.replica_id)) is not None:
                costs[row, same] = np.inf
        row, column = divmod(int(costs.argmin()), len(decodes))
        pair_cost = float(costs[row, column])
        prefill_id, decode_id = prefills[row].replica_id, decodes[column].replica_id
    if local is not None and local_cost <= pair_cost:
        return Choice("", local.replica_id, pair_cost, local_cost)
    return None if pair_cost == float("inf") else Choice(prefill_id, decode_id, pair_cost, local_cost)


def recompute(decision: Decision) -> tuple[str, str]:
    """Recompute (prefill, decode) from the candidates alone, by trying every pair; for audits and tests."""
    prefills = [item for item in decision.candidates if item.side == "prefill"]
    decodes = [item for item in decision.candidates if item.side == "decode"]
    choices = [(item.cost, "", item.replica_id) for item in decision.candidates if item.side == "local"]
    for prefill in prefills:
        for decode in decodes:
            if prefill.replica_id != decode.replica_id:
                share = decode.uncached_tokens / (decode.matched_tokens + decode.uncached_tokens)
                cost = prefill.cost + decode.cost + prefill.transfer_tokens * share
                choices.append((cost, prefill.replica_id, decode.replica_id))
    _, prefill_id, decode_id = min(choices, key=lambda choice: choice[0])
    return prefill_id, decode_id


def _computing(
    side: str, replica: ReplicaCost, pressure: float, note: str, transfer_tokens: float
) -> Candidate:
    """A candidate on whose replica the prompt is computed."""
    state = replica.state
    return Candidate(
        replica_id=state.report.identity.replica_id,
        side=side,
        matched_tokens=replica.matched_tokens,
        uncached_tokens=replica.uncached_tokens,
        backlog_tokens=float(state.backlog_tokens),
        transfer_tokens=transfer_tokens,
        pressure_tokens=pressure,
        cost=replica.uncached_tokens + replica.loading_tokens + state.backlog_tokens + pressure,
        note=note,
        dram_tokens=replica.dram_tokens,
        nvme_tokens=replica.nvme_tokens,
        loading_tokens=replica.loading_tokens,
    )


def _cost(candidate: Candidate) -> float:
    return candidate.cost


def _decode_pressure(query: RouteQuery, replica: ReplicaCost, decode_pressure: float) -> tuple[float, str]:
    """Return pressure and penalties of the decode side, and a note that names the penalties."""
    pressure = decode_pressure * replica.state.num_sequences
    space_penalty = space_penalty_tokens(query, replica)
    if not space_penalty and not replica.is_stale:
        return pressure, ""
    notes = ["no space now"] if space_penalty else []
    if replica.is_stale:
        notes.append("stale load")
    return pressure + space_penalty + (STALE_TOKENS if replica.is_stale else 0.0), ", ".join(notes)


# The policies: `cost` is the default, the plain ones are there to compare it with. A policy only prices;
# `choose` then takes the least, so that every decision can be recomputed.

_MASK_64 = (1 << 64) - 1


class Policy(Protocol):
    """Prices the replicas of one request. Both lists come least recently chosen first."""

    def candidates(
        self, query: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        """Return candidates for the sides "prefill", "decode" and "local". A decode replica that may only
        serve alone gets no "decode" candidate."""


class CostPolicy:
    """The costs of `router.policies`. Skips the prefill pool whenever little is uncached at the decode
    side."""

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
