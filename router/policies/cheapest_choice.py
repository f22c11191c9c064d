"""Take the cheapest pair of replicas, or the cheapest replica that serves alone, of all candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from router.messages import Candidate, Decision, TimeLimit

# A pair waits for its queue and for its place at the same time, and begins when both are free: so much of the
# shorter wait is saved.
OVERLAP = 0.7


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


def _cost(candidate: Candidate) -> float:
    return candidate.cost_s


def _is_in_time(candidate: Candidate, limit: TimeLimit | None, place_wait_s: float = 0.0) -> bool:
    """Whether a prompt that is computed there is in time, with that wait for a place elsewhere."""
    wait_s = max(candidate.queue_s, place_wait_s, candidate.load_s)
    return limit is None or limit.allows(wait_s, candidate.prefill_s)
