"""The interface of a routing policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.messages import Candidate
from router.policies.replica_cost import ReplicaCost, RouteQuery


class RoutingPolicy(Protocol):
    """Prices the replicas of one request. Both lists come least recently chosen first."""

    def candidates(
        self, query: RouteQuery, prefills: Sequence[ReplicaCost], decodes: Sequence[ReplicaCost]
    ) -> list[Candidate]:
        """Return candidates for the sides "prefill", "decode" and "local". A decode replica that may only
        serve alone gets no "decode" candidate."""


def must_stay(query: RouteQuery, replica: ReplicaCost) -> bool:
    """Return whether a decode replica lacks so little of the prompt that it always computes that itself."""
    if not query.may_stay:
        return False
    loading = replica.load_s / replica.state.rates.token_s if replica.load_s else 0.0
    return replica.uncached_tokens + loading <= query.skip_prefill_tokens
