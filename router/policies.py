"""Price each choice in seconds: pure functions from load and matches to candidates, and to the cheapest
choice.

All delays that a choice causes are added: those of the request itself, of later requests, and of the streams
that it disturbs. What things take at a replica is in `router.rates`, by its own measurements, so unlike
replicas share load by their speed.

    prefill p         own_s(p) + load_s(p) + queue_s(p) + work(p) + disturbance(p) + once_s(p)
    decode d          place_wait_s(d) + num_steps x step_s(d) + no space(d)
    pair p, d         prefill p + decode d - met(p, d) + transfer_s(p) x uncached part(d)
    local d           prefill d + decode d

*Own*: the time to compute what is uncached, behind what is held, and what decodes in the same steps; at least
one token must be computed. *Prefill* is that without the decodes: what others suffer.

*Loading*: a token of the prefix that the store of the replica's node holds is loaded instead of computed, in
the time its tier takes. Loading delays no other request: other work runs meanwhile. A token that would take
as long to load as to compute is computed, and counts as uncached. At the decode side of a pair only the
device counts: the prefill side sends what only the store holds all the same.

*Once*: what is sent to the decode side whatever that has: states, and the KV in layers with a window, of the
last tokens alone.

*Queue*: the time of all that was placed there before and is not computed, also of what gateways still hold,
as far as it goes before the request; or of waiting for a place among the sequences that run, if that is
longer.

*Waiting for a place*: where as many sequences run as the replica takes, a place is free whenever one ends:
after the mean time of a sequence there, over their number. Blocks, the streams that a prefill disturbs and
the sequences of a step are those that were sent there: what gateways hold takes none yet. A pair waits for
both at the same time: `met` is 0.7 of the shorter wait.

*Work*: a part of the prefill once more. For the request itself, queueing behind a sibling that computes the
prefix is no better than computing it again on an idle replica; for all others it is.

*Disturbance*: each of the n streams of the replica waits as long as the prefill takes. A wait that is a small
part of a decode step goes unnoticed, so it counts by that part: n x prefill_s x min(1, prefill_s / step_s).
Prefill replicas have no streams. On a replica of the decode role one more stream is counted: its capacity is
reserved for streams, and the next is due.

*Decode*: the step at the batch and context that result, `num_steps` times: as many output tokens count as
the time to the first one.

Plain policies use the same candidates with costs of their own, so every decision is an argmin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from router.config import RouterConfig
from router.load import CurrentLoad
from router.messages import Candidate, Decision, TimeLimit
from router.prefix_match import Match

# The part of the prefill that counts as delay of later requests. Chosen on a public conversation trace (16
# nodes): 0.2 has the least mean TTFT at 100 % load and costs under 1 % of it at 50 %; 1.0 has more hits.
WORK_PART = 0.2
# A pair waits for its queue and for its place at the same time, and begins when both are free: so much of the
# shorter wait is saved.
OVERLAP = 0.7
# Added when the prompt and its growth do not fit the free blocks now (plus the time of the missing tokens).
NO_SPACE_S = 1e3
# Added for each side whose load is unknown or stale: the replica becomes the last choice.
STALE_S = 1e6
# Added when the prompt would not fit the device even if it were empty, for a prefill replica and for the
# decode side of a pair. A replica that serves alone may keep the rest in host memory, as much as it reported.
NEVER_FITS_S = 1e9


class View(NamedTuple):
    """What a decision sees in addition to the loads: cached blocks, waits by replica that replace those of
    the loads, the part of what gateways hold that goes before it, the time before which a report is stale,
    and the limit beyond which choices do not exist."""

    match: Match
    waits: Mapping[str, float]
    queued_part: float
    oldest: float
    limit: TimeLimit | None = None


class RouteQuery(NamedTuple):
    """What a request needs. `num_growth_tokens` is the most that all its samples together may produce."""

    num_tokens: int
    num_growth_tokens: int
    num_samples: int
    block_tokens: int
    skip_prefill_tokens: int
    # False when a prefill replica is pinned: then no replica serves the request alone.
    may_stay: bool
    # The part of each replica's blocks that its sharing group may use.
    kv_share: float = 1.0


class ReplicaCost(NamedTuple):
    """A replica that may be chosen: its load, how many leading prompt tokens its device holds, how many it
    would compute, and how many in between it would load from which tier of its node's store; the time of
    computing these, with what decodes in the same steps in `own_s`, and of loading; and the waits until it is
    computed there, and for a place."""

    state: CurrentLoad
    is_stale: bool
    matched_tokens: int
    uncached_tokens: int
    prefill_s: float
    own_s: float
    queue_s: float
    place_wait_s: float
    dram_tokens: int = 0
    nvme_tokens: int = 0
    load_s: float = 0.0


class Choice(NamedTuple):
    """The cheapest choice. `prefill` "" means that the decode replica prefills by itself. A cost is `inf`
    where no such choice exists; `other_cost_s` is that of the cheapest one that computes elsewhere, where it
    was looked for, and `before_cost_s` that of an earlier choice."""

    prefill: str
    decode: str
    pair_cost_s: float
    local_cost_s: float
    other_cost_s: float = float("inf")
    before_cost_s: float = float("inf")

    @property
    def cost_s(self) -> float:
        return min(self.pair_cost_s, self.local_cost_s)

    @property
    def gain_s(self) -> float:
        """The gain over the earlier choice."""
        return self.before_cost_s - self.cost_s


def disturbance_s(state: CurrentLoad, prefill_s: float) -> float:
    """Return the delay of the replica's streams if it computes for so long (formula above)."""
    if state.role == "prefill":
        return 0.0
    num_streams = state.num_sent_sequences + (1 if state.role == "decode" else 0)
    return num_streams * prefill_s * min(1.0, prefill_s / state.rates.present_step_s)


def replica_cost(
    query: RouteQuery,
    state: CurrentLoad,
    is_stale: bool,
    device: int,
    dram: int,
    nvme: int,
    *,
    queued_part: float = 1.0,
) -> ReplicaCost:
    """Price a replica with `device` leading blocks of the prompt on its device, and after them `dram` and
    `nvme` blocks in its node's store. At least one token must be computed, even if all are held.
    `queued_part` of the work that gateways hold goes before the request."""
    rates = state.rates
    matched_tokens = min(device * query.block_tokens, query.num_tokens - 1)
    rest_tokens = query.num_tokens - matched_tokens
    dram_tokens = nvme_tokens = 0
    if dram and rates.dram_s < rates.token_s:
        dram_tokens = min(dram * query.block_tokens, rest_tokens - 1)
    if nvme and rates.nvme_s < rates.token_s:
        nvme_tokens = min(nvme * query.block_tokens, rest_tokens - 1 - dram_tokens)
    uncached_tokens = rest_tokens - dram_tokens - nvme_tokens
    prefill_s = rates.prefill_s(uncached_tokens, query.num_tokens - uncached_tokens)
    return ReplicaCost(
        state,
        is_stale,
        matched_tokens,
        uncached_tokens=uncached_tokens,
        prefill_s=prefill_s,
        own_s=prefill_s + uncached_tokens * rates.mixed_s,
        queue_s=state.queue(queued_part),
        place_wait_s=state.place_wait(queued_part),
        dram_tokens=dram_tokens,
        nvme_tokens=nvme_tokens,
        load_s=dram_tokens * rates.dram_s + nvme_tokens * rates.nvme_s,
    )


def replica_costs(
    query: RouteQuery, states: Iterable[tuple[str, CurrentLoad]], view: View
) -> list[ReplicaCost]:
    """Price replicas as a decision sees them."""
    match, replicas = view.match, []
    for replica_id, state in states:
        device, (dram, nvme) = match.of(replica_id)
        is_stale = state.report.received_at < view.oldest
        cost = replica_cost(query, state, is_stale, device, dram, nvme, queued_part=view.queued_part)
        wait_s = view.waits.get(replica_id)
        replicas.append(cost if wait_s is None else cost._replace(queue_s=wait_s))
    return replicas


def space_penalty_s(query: RouteQuery, replica: ReplicaCost) -> float:
    """Return 0 if prompt and growth fit the decode replica's free blocks; else a large penalty that grows
    with the number of missing blocks. Before any report the free blocks are unknown and taken to be
    enough."""
    state = replica.state
    if not state.report.num_total_blocks:
        return 0.0
    needed_tokens = query.num_tokens - replica.matched_tokens + query.num_growth_tokens
    missing = -(-needed_tokens // query.block_tokens) - state.num_free_blocks
    return 0.0 if missing <= 0 else NO_SPACE_S + missing * query.block_tokens * state.rates.token_s


def never_fits(query: RouteQuery, state: CurrentLoad) -> bool:
    """Whether the prompt exceeds all of the replica's device memory, or its group's share of it, as far as
    that is known."""
    num_blocks = state.report.num_total_blocks
    return num_blocks > 0 and int(num_blocks * query.kv_share) * query.block_tokens <= query.num_tokens


def prefill_candidate(query: RouteQuery, replica: ReplicaCost) -> Candidate:
    """Price the replica as the prefill side of a pair."""
    state = replica.state
    pressure_s = WORK_PART * replica.prefill_s + disturbance_s(state, replica.prefill_s)
    note = ""
    if never_fits(query, state):
        pressure_s += NEVER_FITS_S
        note = "never fits"
    if replica.is_stale:
        pressure_s += STALE_S
        note = f"{note}, stale load" if note else "stale load"
    rates = state.rates
    once_s = rates.once_s(query.num_tokens, state.report.window_tokens)
    return _computing("prefill", replica, pressure_s, note, query.num_tokens * rates.transfer_s, once_s)


def decode_candidate(query: RouteQuery, replica: ReplicaCost, num_steps: float) -> Candidate:
    """Price the replica as the decode side of a pair, which is sent all blocks that its device does not
    hold."""
    pressure_s, note = _decode_pressure(query, replica, num_steps)
    state = replica.state
    if never_fits(query, state):
        pressure_s += NEVER_FITS_S
        note = f"never fits, {note}" if note else "never fits"
    return Candidate(
        replica_id=state.report.identity.replica_id,
        side="decode",
        matched_tokens=replica.matched_tokens,
        uncached_tokens=query.num_tokens - replica.matched_tokens,
        queue_s=replica.place_wait_s,
        transfer_s=0.0,
        pressure_s=pressure_s,
        cost_s=replica.place_wait_s + pressure_s,
        note=note,
        step_s=state.rates.step_s,
    )


def local_candidate(query: RouteQuery, replica: ReplicaCost, num_steps: float) -> Candidate:
    """Price the replica as one that prefills and decodes the request by itself."""
    state = replica.state
    pressure_s, note = _decode_pressure(query, replica, num_steps)
    disturbed_s = disturbance_s(state, replica.prefill_s)
    pressure_s += WORK_PART * replica.prefill_s + disturbed_s
    exceeds_share = query.kv_share < 1 and never_fits(query, state)
    if exceeds_share or 0 < state.report.max_local_tokens <= query.num_tokens:
        pressure_s += NEVER_FITS_S
        note = f"never fits, {note}" if note else "never fits"
    if replica.is_stale:  # once for each side, as for a pair: with all loads stale, the rest decides
        pressure_s += STALE_S
    if disturbed_s:
        disturbs = f"disturbs by {1e3 * disturbed_s:.1f} ms"
        note = f"{note}; {disturbs}" if note else disturbs
    return _computing("local", replica, pressure_s, note, 0.0)


def choose(
    candidates: list[Candidate], *, finds_other: bool = False, limit: TimeLimit | None = None
) -> Choice | None:
    """Return the cheapest choice: a pair of two different replicas, or a local candidate, which wins a tie.
    With `finds_other` return as well the cost of the cheapest choice that computes elsewhere. With `limit`
    later choices do not exist. Other ties go to the first prefill, then the first decode candidate. None if
    nothing can be chosen."""
    prefills = [item for item in candidates if item.side == "prefill"]
    decodes = [item for item in candidates if item.side == "decode"]
    alone = [item for item in candidates if item.side == "local" and _is_in_time(item, limit)]
    local = min(alone, key=_cost, default=None)
    local_cost_s = float("inf") if local is None else local.cost_s
    pair_cost_s, prefill_id, decode_id = float("inf"), "", ""
    by_prefill: list[float] = []
    if prefills and decodes:
        costs = np.array([item.cost_s for item in prefills])[:, None] + np.array(
            [item.cost_s for item in decodes]
        )
        num_tokens = decodes[0].matched_tokens + decodes[0].uncached_tokens
        lacking = np.array([item.uncached_tokens / num_tokens for item in decodes])
        place_waits_s = np.array([item.queue_s for item in decodes])
        queues_s = np.array([item.queue_s for item in prefills])[:, None]
        costs -= OVERLAP * np.minimum(queues_s, place_waits_s)
        costs += np.array([item.transfer_s for item in prefills])[:, None] * lacking
        decode_rows = {item.replica_id: row for row, item in enumerate(decodes)}
        for row, item in enumerate(prefills):
            if (same := decode_rows.get(item.replica_id)) is not None:
                costs[row, same] = np.inf
        if limit is not None:
            loads_s = np.array([item.load_s for item in prefills])[:, None]
            waits_s = np.maximum(np.maximum(queues_s, place_waits_s), loads_s)
            ttfts_s = waits_s + np.array([item.prefill_s for item in prefills])[:, None]
            costs[(waits_s > limit.wait_s) | (ttfts_s > limit.ttft_s)] = np.inf
        row, column = divmod(int(costs.argmin()), len(decodes))
        pair_cost_s = float(costs[row, column])
        prefill_id, decode_id = prefills[row].replica_id, decodes[column].replica_id
        by_prefill = costs.min(axis=1).tolist()
    if local is not None and local_cost_s <= pair_cost_s:
        prefill_id, decode_id = "", local.replica_id
    elif pair_cost_s == float("inf"):
        return None
    other_cost_s = float("inf")
    if finds_other:
        compute_id = prefill_id or decode_id
        ids = [item.replica_id for item in (*prefills[: len(by_prefill)], *alone)]
        costs_s = [*by_prefill, *map(_cost, alone)]
        elsewhere = (cost_s for each, cost_s in zip(ids, costs_s, strict=True) if each != compute_id)
        other_cost_s = min(elsewhere, default=float("inf"))
    return Choice(prefill_id, decode_id, pair_cost_s, local_cost_s, other_cost_s)


def cost_of(
    candidates: Sequence[Candidate], prefill_id: str, decode_id: str, limit: TimeLimit | None = None
) -> float:
    """Return the cost of a choice; inf: it is not among the candidates, or later than the limit."""
    found = {(item.side, item.replica_id): item for item in candidates}
    prefill, decode = found.get(("prefill", prefill_id)), found.get(("decode", decode_id))
    if not prefill_id:
        local = found.get(("local", decode_id))
        return float("inf") if local is None or not _is_in_time(local, limit) else local.cost_s
    if prefill is None or decode is None or not _is_in_time(prefill, limit, decode.queue_s):
        return float("inf")
    return _pair_cost_s(prefill, decode)


def recompute(decision: Decision) -> tuple[str, str]:
    """Recompute (prefill, decode) from the candidates and the limit alone, by trying every pair; for audits
    and tests."""
    limit = decision.limit
    prefills = [item for item in decision.candidates if item.side == "prefill"]
    decodes = [item for item in decision.candidates if item.side == "decode"]
    alone = [item for item in decision.candidates if item.side == "local" and _is_in_time(item, limit)]
    choices = [(item.cost_s, "", item.replica_id) for item in alone]
    for prefill in prefills:
        for decode in decodes:
            is_pair = prefill.replica_id != decode.replica_id
            if is_pair and _is_in_time(prefill, limit, decode.queue_s):
                choices.append((_pair_cost_s(prefill, decode), prefill.replica_id, decode.replica_id))
    _, prefill_id, decode_id = min(choices, key=lambda choice: choice[0])
    return prefill_id, decode_id


def _pair_cost_s(prefill: Candidate, decode: Candidate) -> float:
    share = decode.uncached_tokens / (decode.matched_tokens + decode.uncached_tokens)
    cost_s = prefill.cost_s + decode.cost_s - OVERLAP * min(prefill.queue_s, decode.queue_s)
    return cost_s + prefill.transfer_s * share


def _computing(
    side: str, replica: ReplicaCost, pressure_s: float, note: str, transfer_s: float, once_s: float = 0.0
) -> Candidate:
    """Return a candidate on whose replica the prompt is computed."""
    state = replica.state
    queue_s = max(replica.queue_s, replica.place_wait_s) if side == "local" else replica.queue_s
    return Candidate(
        replica_id=state.report.identity.replica_id,
        side=side,
        matched_tokens=replica.matched_tokens,
        uncached_tokens=replica.uncached_tokens,
        queue_s=queue_s,
        transfer_s=transfer_s,
        pressure_s=pressure_s,
        cost_s=replica.own_s + replica.load_s + queue_s + pressure_s + once_s,
        note=note,
        dram_tokens=replica.dram_tokens,
        nvme_tokens=replica.nvme_tokens,
        load_s=replica.load_s,
        prefill_s=replica.own_s,
        step_s=state.rates.step_s,
        once_s=once_s,
    )


def _cost(candidate: Candidate) -> float:
    return candidate.cost_s


def _is_in_time(candidate: Candidate, limit: TimeLimit | None, place_wait_s: float = 0.0) -> bool:
    """Whether a prompt that is computed there is in time, with that wait for a place elsewhere."""
    wait_s = max(candidate.queue_s, place_wait_s, candidate.load_s)
    return limit is None or limit.allows(wait_s, candidate.prefill_s)


def _decode_pressure(query: RouteQuery, replica: ReplicaCost, num_steps: float) -> tuple[float, str]:
    """Return the cost of decoding there, with penalties, and a note that names the penalties."""
    pressure_s = num_steps * replica.state.rates.step_s
    penalty_s = space_penalty_s(query, replica)
    if not penalty_s and not replica.is_stale:
        return pressure_s, ""
    notes = ["no space now"] if penalty_s else []
    if replica.is_stale:
        notes.append("stale load")
    return pressure_s + penalty_s + (STALE_S if replica.is_stale else 0.0), ", ".join(notes)


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

    def __init__(self, num_steps: float) -> None:
        self._num_steps = num_steps

    def candidates(
        self, query: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        priced = [prefill_candidate(query, replica) for replica in prefills]
        for replica in decodes:
            if not _must_stay(query, replica):
                priced.append(decode_candidate(query, replica, self._num_steps))
            if query.may_stay:
                priced.append(local_candidate(query, replica, self._num_steps))
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
        best_prefill = min((candidate.cost_s for candidate in priced), default=0.0)
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
    return CostPolicy(config.decode_steps)


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
    """Prefer the replica that holds most of the prompt, regardless of its load."""
    return [
        -float(replica.matched_tokens + replica.dram_tokens + replica.nvme_tokens) for replica in replicas
    ]


def _must_stay(query: RouteQuery, replica: ReplicaCost) -> bool:
    if not query.may_stay:
        return False
    loading = replica.load_s / replica.state.rates.token_s if replica.load_s else 0.0
    return replica.uncached_tokens + loading <= query.skip_prefill_tokens


def _plain(query: RouteQuery, replica: ReplicaCost, side: str, rank: float) -> Candidate:
    state = replica.state
    is_decode = side == "decode"
    return Candidate(
        replica_id=state.report.identity.replica_id,
        side=side,
        matched_tokens=replica.matched_tokens,
        uncached_tokens=query.num_tokens - replica.matched_tokens if is_decode else replica.uncached_tokens,
        queue_s=0.0 if is_decode else replica.queue_s,
        transfer_s=0.0,
        pressure_s=0.0,
        cost_s=rank + (STALE_S if replica.is_stale else 0.0),
        note="stale load" if replica.is_stale else "",
        dram_tokens=0 if is_decode else replica.dram_tokens,
        nvme_tokens=0 if is_decode else replica.nvme_tokens,
        load_s=0.0 if is_decode else replica.load_s,
        prefill_s=0.0 if is_decode else replica.own_s,
        step_s=state.rates.step_s,
    )
