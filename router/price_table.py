"""Prices of all choices of a request at once, over arrays of what replicas are like now.

The formulas are those of `router.policies`, term by term and in the same order, so that both find the same
costs to the last bit: `Decision.candidates`, which are made only where somebody reads them, show them one by
one. A row is filled in again when the load of its replica has changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.load import CurrentLoad, LoadTracker
from router.policies import NEVER_FITS_S, NO_SPACE_S, OVERLAP, STALE_S, WORK_PART, Choice, RouteQuery
from router.radix import Match, PrefixTree

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

# Multiplies hashes of replicas, because checksums with two seeds differ by the same bits for all ids.
HASH_FACTOR = 0x9E3779B1


class _Columns(NamedTuple):
    """What the prices need of each replica: a number a row."""

    received_at: Floats
    num_sent_tokens: Floats
    num_held_tokens: Floats
    num_sent_sequences: Floats
    num_held_sequences: Floats
    num_places: Floats
    place_s: Floats
    num_free_blocks: Floats
    num_total_blocks: Floats
    max_local_tokens: Floats
    token_s: Floats
    product_s: Floats
    attention_s: Floats
    mixed_s: Floats
    transfer_s: Floats
    dram_s: Floats
    nvme_s: Floats
    present_step_s: Floats
    step_s: Floats


class _Costs(NamedTuple):
    """Of each replica on each side; `lacking` is the part of the prompt that its device does not hold."""

    prefill_s: Floats
    decode_s: Floats
    local_s: Floats
    transfer_s: Floats
    lacking: Floats
    queue_s: Floats
    place_wait_s: Floats
    must_stay: npt.NDArray[np.bool_]


class PriceTable:
    """The replicas that may be chosen for any request that neither excludes nor pins some."""

    def __init__(
        self,
        load: LoadTracker,
        tree: PrefixTree,
        prefill_ids: Sequence[str],
        decode_ids: Sequence[str],
        roles: Mapping[str, str],
    ) -> None:
        self.ids = list(dict.fromkeys([*prefill_ids, *decode_ids]))
        self.states: list[CurrentLoad] = [load.state(each) for each in self.ids]
        self._load = load
        self._slots = np.array([tree.slot(each) for each in self.ids], dtype=np.intp)
        row_of = {replica_id: row for row, replica_id in enumerate(self.ids)}
        self._row_of = row_of
        self._prefill_rows = np.array([row_of[each] for each in prefill_ids], dtype=np.intp)
        self._decode_rows = np.array([row_of[each] for each in decode_ids], dtype=np.intp)
        self._has_both = bool(set(prefill_ids) & set(decode_ids))
        self._is_prefill = np.array([roles[each] == "prefill" for each in self.ids])
        self._is_decode = np.array([float(roles[each] == "decode") for each in self.ids])
        self._values = np.array([_row(state) for state in self.states]).T.copy()
        self._columns = _Columns(*self._values)
        self._checksums = np.array([zlib.crc32(each.encode()) for each in self.ids], dtype=np.uint64)
        self._lengths = np.array([len(each.encode()) for each in self.ids])

    def refresh(self) -> None:
        """Take over what has changed."""
        states, current = self.states, self._load.state
        for row, replica_id in enumerate(self.ids):
            state = current(replica_id)
            if state is not states[row]:
                states[row] = state
                self._values[:, row] = _row(state)

    def hashed(self, seed: int) -> npt.NDArray[np.uint64]:
        """Return a number of each replica and this seed, by which those of equal cost are ordered."""
        moved = np.empty_like(self._checksums)
        for length in set(self._lengths.tolist()):
            # Checksums of texts of one length move by the same bits from seed to seed.
            moved[self._lengths == length] = zlib.crc32(bytes(length), seed) ^ zlib.crc32(bytes(length))
        return ((self._checksums ^ moved) * np.uint64(HASH_FACTOR)) & np.uint64(0xFFFFFFFF)

    def sides(self, ranks: npt.NDArray[np.uint64] | None, last_used: Iterable[str]) -> tuple[Rows, Rows]:
        """Return the rows of both sides: by their ranks, or least recently used first."""
        if ranks is None:
            order = np.zeros(len(self.ids), dtype=np.intp)
            row_of = self._row_of
            rows = [row_of[each] for each in last_used if each in row_of]
            order[rows] = np.arange(len(rows))
            return (
                self._prefill_rows[np.argsort(order[self._prefill_rows], kind="stable")],
                self._decode_rows[np.argsort(order[self._decode_rows], kind="stable")],
            )
        return (
            self._prefill_rows[np.argsort(ranks[self._prefill_rows], kind="stable")],
            self._decode_rows[np.argsort(ranks[self._decode_rows], kind="stable")],
        )

    def cheapest(
        self,
        query: RouteQuery,
        match: Match,
        sides: tuple[Rows, Rows],
        waits: Mapping[str, float],
        held_part: float,
        oldest: float,
        num_steps: float,
        *,
        finds_other: bool = False,
        before: tuple[str, str] | None = None,
    ) -> Choice | None:
        """Return the cheapest choice, as `router.policies.choose` does; with `finds_other` also what the
        cheapest one costs that computes elsewhere, and what the prefill and decode replica of `before` do."""
        costs = self._costs(query, match, waits, held_part, oldest, num_steps)
        prefills, decodes = sides
        local_s = pairs = np.empty(0)
        local_cost_s, local_id = float("inf"), ""
        if query.may_stay and len(decodes):
            local_s = costs.local_s[decodes]
            best = int(local_s.argmin())
            local_cost_s, local_id = float(local_s[best]), self.ids[decodes[best]]
        pair_cost_s, prefill_id, decode_id = float("inf"), "", ""
        decodes = decodes[~costs.must_stay[decodes]]
        if len(prefills) and len(decodes):
            pairs = costs.prefill_s[prefills][:, None] + costs.decode_s[decodes]
            pairs -= OVERLAP * np.minimum(costs.queue_s[prefills][:, None], costs.place_wait_s[decodes])
            pairs += costs.transfer_s[prefills][:, None] * costs.lacking[decodes]
            if self._has_both:
                pairs[prefills[:, None] == decodes] = np.inf
            row, column = divmod(int(pairs.argmin()), len(decodes))
            pair_cost_s = float(pairs[row, column])
            prefill_id, decode_id = self.ids[prefills[row]], self.ids[decodes[column]]
        if local_id and local_cost_s <= pair_cost_s:
            prefill_id, decode_id = "", local_id
        elif pair_cost_s == float("inf"):
            return None
        other_cost_s = float("inf")
        if finds_other:
            compute = self._row_of[prefill_id or decode_id]
            here_local, here_pair = sides[1] == compute, prefills == compute
            if local_s.size:
                other_cost_s = float(local_s.min(initial=np.inf, where=~here_local))
            if pairs.size:
                other_pair_s = pairs.min(initial=np.inf, where=~here_pair[:, None])
                other_cost_s = min(other_cost_s, float(other_pair_s))
        before_cost_s = float("inf") if before is None else self._cost_of(query, costs, *before)
        return Choice(prefill_id, decode_id, pair_cost_s, local_cost_s, other_cost_s, before_cost_s)

    def _cost_of(self, query: RouteQuery, costs: _Costs, prefill_id: str, decode_id: str) -> float:
        """Return what a choice costs; inf: it is not possible."""
        prefill, decode = self._row_of.get(prefill_id, -1), self._row_of.get(decode_id, -1)
        if decode not in self._decode_rows:
            return float("inf")
        if not prefill_id:
            return float(costs.local_s[decode]) if query.may_stay else float("inf")
        if prefill not in self._prefill_rows or costs.must_stay[decode]:
            return float("inf")
        cost_s = costs.prefill_s[prefill] + costs.decode_s[decode]
        cost_s -= OVERLAP * min(costs.queue_s[prefill], costs.place_wait_s[decode])
        return float(cost_s + costs.transfer_s[prefill] * costs.lacking[decode])

    def _costs(
        self,
        query: RouteQuery,
        match: Match,
        waits: Mapping[str, float],
        held_part: float,
        oldest: float,
        num_steps: float,
    ) -> _Costs:
        now = self._columns
        queue_s = (now.num_sent_tokens + held_part * now.num_held_tokens) * now.token_s
        num_before = now.num_sent_sequences + held_part * now.num_held_sequences
        place_wait_s = np.maximum(0.0, num_before + 1 - now.num_places) * now.place_s
        if waits:
            rows = [self._row_of[each] for each in waits if each in self._row_of]
            queue_s[rows] = [wait_s for each, wait_s in waits.items() if each in self._row_of]
        num_tokens, block_tokens = query.num_tokens, query.block_tokens
        matched = match.num_device[self._slots] * block_tokens
        np.minimum(matched, num_tokens - 1, out=matched)
        uncached: npt.NDArray[np.int64] = num_tokens - matched
        load_s: Floats | float = 0.0
        if match.num_dram is not None and match.num_nvme is not None:
            stored = match.num_dram[self._slots] * block_tokens, match.num_nvme[self._slots] * block_tokens
            dram = np.where(now.dram_s < now.token_s, np.minimum(stored[0], uncached - 1), 0)
            nvme = np.where(now.nvme_s < now.token_s, np.minimum(stored[1], uncached - 1 - dram), 0)
            uncached = uncached - dram - nvme
            load_s = dram * now.dram_s + nvme * now.nvme_s
        prefill_s = uncached * (now.product_s + now.attention_s * ((num_tokens - uncached) + 0.5 * uncached))
        num_streams = now.num_sent_sequences + self._is_decode
        disturbance_s = num_streams * prefill_s * np.minimum(1.0, prefill_s / now.present_step_s)
        disturbance_s[self._is_prefill] = 0.0
        own_s = WORK_PART * prefill_s + disturbance_s
        stale_s: Floats | float = 0.0
        if now.received_at.min() < oldest:
            stale_s = np.where(now.received_at < oldest, STALE_S, 0.0)
        fits_not = np.floor(now.num_total_blocks * query.kv_share) * block_tokens <= num_tokens
        never_s: Floats | float = 0.0
        if fits_not.any():
            fits_not &= now.num_total_blocks > 0
            never_s = np.where(fits_not, NEVER_FITS_S, 0.0)
        decode_s = num_steps * now.step_s + self._space_s(query, matched) + stale_s
        too_long = (now.max_local_tokens > 0) & (now.max_local_tokens <= num_tokens)
        if query.kv_share < 1:
            too_long |= fits_not
        local_s = decode_s + own_s + NEVER_FITS_S * too_long + stale_s
        computing_s = prefill_s + uncached * now.mixed_s + load_s
        must_stay = np.zeros(len(self.ids), dtype=np.bool_)
        if query.may_stay:
            must_stay = uncached + load_s / now.token_s <= query.skip_prefill_tokens
        return _Costs(
            prefill_s=computing_s + queue_s + (own_s + never_s + stale_s),
            decode_s=place_wait_s + (decode_s + never_s),
            local_s=computing_s + np.maximum(queue_s, place_wait_s) + local_s,
            transfer_s=num_tokens * now.transfer_s,
            lacking=(num_tokens - matched) / num_tokens,
            queue_s=queue_s,
            place_wait_s=place_wait_s,
            must_stay=must_stay,
        )

    def _space_s(self, query: RouteQuery, matched: npt.NDArray[np.int64]) -> Floats | float:
        now = self._columns
        if query.num_tokens + query.num_growth_tokens <= now.num_free_blocks.min() * query.block_tokens:
            return 0.0
        needed = query.num_tokens - matched + query.num_growth_tokens
        missing = -(-needed // query.block_tokens) - now.num_free_blocks
        penalty_s = NO_SPACE_S + missing * query.block_tokens * now.token_s
        return np.where((missing > 0) & (now.num_total_blocks > 0), penalty_s, 0.0)


def _row(state: CurrentLoad) -> tuple[float, ...]:
    """Return the replica's numbers in the order of `_Columns`."""
    report, rates = state.report, state.rates
    return (
        report.received_at,
        state.backlog_tokens - state.num_held_tokens,
        state.num_held_tokens,
        state.num_sent_sequences,
        state.num_held_sequences,
        state.num_places,
        state.place_s,
        state.num_free_blocks,
        report.num_total_blocks,
        report.max_local_tokens,
        rates.token_s,
        rates.product_s,
        rates.attention_s,
        rates.mixed_s,
        rates.transfer_s,
        rates.dram_s,
        rates.nvme_s,
        rates.present_step_s,
        rates.step_s,
    )
