"""A policy that ranks the replicas of each side, regardless of what a pair costs: for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from router.messages import Candidate
from router.policies.cost_policy import STALE_S
from router.policies.replica_cost import ReplicaCost, RouteQuery
from router.policies.routing_policy import must_stay

# "prefill" replicas compute a prompt, "decode" replicas continue it, and "local" ones do both.
Side = Literal["prefill", "decode", "local"]


class Ranker(Protocol):
    """Ranks the replicas of one side for a request, which may be none."""

    def rank(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return a number for each replica: the least wins, and of equal ones the first replica."""


class PlainPolicy:
    """Prices each replica by its place in the order of a ranker.

    The prefill pool is used unless it is empty or the chosen decode replica lacks almost nothing. Replicas of
    role "both" never prefill for others here.
    """

    def __init__(self, ranker: Ranker) -> None:
        self._ranker = ranker

    def candidates(
        self, query: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        """Return candidates as `RoutingPolicy` describes. The costs of one side are places from 0 on: what is
        added where a load is stale is more than all of them."""
        if query.may_stay:
            prefills = [replica for replica in prefills if replica.state.role == "prefill"]
        priced = [
            _candidate(query, replica, "prefill", place)
            for replica, place in zip(prefills, self._places(query, prefills, "prefill"), strict=True)
        ]
        best_prefill = min((candidate.cost_s for candidate in priced), default=0.0)
        places = self._places(query, decodes, "decode" if prefills else "local")
        for replica, place in zip(decodes, places, strict=True):
            if query.may_stay and (not prefills or must_stay(query, replica)):
                priced.append(_candidate(query, replica, "local", place + best_prefill))
            else:
                priced.append(_candidate(query, replica, "decode", place))
        return priced

    def _places(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return the place of each replica in the order of the ranks; equal ranks have one place."""
        ranks = self._ranker.rank(query, replicas, side) if replicas else []
        rank_to_place = {rank: float(place) for place, rank in enumerate(sorted(set(ranks)))}
        return [rank_to_place[rank] for rank in ranks]


def num_cached_tokens(replica: ReplicaCost) -> int:
    """Return how many leading tokens of the prompt the replica need not compute."""
    return replica.matched_tokens + replica.dram_tokens + replica.nvme_tokens


def _candidate(query: RouteQuery, replica: ReplicaCost, side: Side, cost: float) -> Candidate:
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
        cost_s=cost + (STALE_S if replica.is_stale else 0.0),
        note="stale load" if replica.is_stale else "",
        dram_tokens=0 if is_decode else replica.dram_tokens,
        nvme_tokens=0 if is_decode else replica.nvme_tokens,
        load_s=0.0 if is_decode else replica.load_s,
        prefill_s=0.0 if is_decode else replica.own_s,
        step_s=state.rates.step_s,
    )
