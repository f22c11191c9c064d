"""Rank replicas by one property: their turn, a random number, their load, or their part of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.policies.plain_policy import Side, num_cached_tokens
from router.policies.replica_cost import ReplicaCost, RouteQuery
from router.policies.seeded_random import SeededRandom


class RoundRobin:
    """Prefers the replica that this gateway chose longest ago.

    Gateways take turns by themselves. They begin at different replicas: those that were never chosen are
    equal, and equal ranks go by a hash of gateway and request.
    """

    def __init__(self, turn_of: Callable[[str], int]) -> None:
        """`turn_of` returns a number by which the replica chosen longest ago comes first."""
        self._turn_of = turn_of

    def rank(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return the turns."""
        return [float(self._turn_of(replica.state.report.identity.replica_id)) for replica in replicas]


class RandomChoice:
    """Chooses any replica."""

    def __init__(self, random: SeededRandom) -> None:
        self._random = random

    def rank(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return random numbers."""
        return [self._random.draw() for _ in replicas]


class LeastLoaded:
    """Prefers the fewest tokens to compute, or the fewest sequences to decode."""

    def rank(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return the loads."""
        if side == "decode":
            return [float(replica.state.num_sequences) for replica in replicas]
        return [float(replica.state.backlog_tokens) for replica in replicas]


class LongestPrefix:
    """Prefers the replica that holds most of the prompt, regardless of its load."""

    def rank(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return the negated lengths of the cached prefixes."""
        return [-float(num_cached_tokens(replica)) for replica in replicas]


def num_requests(replicas: Sequence[ReplicaCost]) -> list[float]:
    """Return how many requests each replica has or is sent."""
    return [float(replica.state.num_requests) for replica in replicas]
