"""The power of two choices: of two random replicas, the one with fewer requests."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.plain_policy import Side
from router.policies.replica_cost import ReplicaCost, RouteQuery
from router.policies.seeded_random import SeededRandom
from router.policies.simple_ranks import num_requests


class PowerOfTwo:
    """Draws two replicas and prefers the one with fewer requests (Mitzenmacher, 2001; the default of Ray
    Serve)."""

    def __init__(self, random: SeededRandom) -> None:
        self._random = random

    def rank(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return 0 for the chosen replica, 1 for the other one that was drawn, and 2 for the rest. A replica
        with stale load is drawn only where fewer than two others are left."""
        fresh = [index for index, replica in enumerate(replicas) if not replica.is_stale]
        drawn = fresh if len(fresh) > 1 else list(range(len(replicas)))
        first = drawn.pop(self._random.index(len(drawn)))
        second = drawn[self._random.index(len(drawn))] if drawn else first
        loads = num_requests(replicas)
        ranks = [2.0] * len(replicas)
        ranks[first], ranks[second] = 1.0, 1.0
        ranks[second if loads[second] < loads[first] else first] = 0.0
        return ranks
