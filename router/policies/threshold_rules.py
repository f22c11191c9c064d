"""The published rules of other routers that follow a cached prefix until loads differ by more than a
threshold.

Each is written from its documentation, with the defaults there. Where prompts and answers have pools of their
own, the rule chooses who computes the prompt, and decode replicas are chosen by load. A load is the number of
requests that a replica has or is sent. Cached prefixes are those that replicas report, where some of these
routers remember which prompts they sent where.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from router.policies.plain_policy import Side, num_cached_tokens
from router.policies.power_of_two import PowerOfTwo
from router.policies.replica_cost import ReplicaCost, RouteQuery
from router.policies.simple_ranks import num_requests


class SglangRule:
    """The policy `cache_aware` of SGLang's router, whose options are `--balance-abs-threshold` 64,
    `--balance-rel-threshold` 1.5 and `--cache-threshold` 0.3.

    If the greatest load exceeds the least by more than 64 and by more than 1.5 times, the least load wins.
    Otherwise the longest cached prefix wins, if it is more than 0.3 of the prompt, and if not, the replica
    with the smallest tree of prompts: here, with the fewest cached blocks.
    """

    MOST_SPREAD = 64
    MOST_RATIO = 1.5
    LEAST_MATCH = 0.3

    def __init__(self, num_cached_blocks: Callable[[str], int]) -> None:
        self._num_cached_blocks = num_cached_blocks

    def rank(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return loads, negated prefixes or sizes, as the rule says."""
        loads = num_requests(replicas)
        most, least = max(loads), min(loads)
        if side == "decode" or (most - least > self.MOST_SPREAD and most > self.MOST_RATIO * least):
            return loads
        cached = [num_cached_tokens(replica) for replica in replicas]
        if max(cached) > self.LEAST_MATCH * query.num_tokens:
            return [-float(num_tokens) for num_tokens in cached]
        return _sizes(replicas, self._num_cached_blocks)


class RayRule:
    """Ray Serve's `PrefixCacheAffinityRouter`, whose arguments are `imbalanced_threshold` 10 and
    `match_rate_threshold` 0.1.

    If loads differ by more than 10, or nobody has cached anything, the power of two choices decides.
    Otherwise the longest cached prefix wins, if it is at least 0.1 of the prompt, and if not, the replica
    whose cache is used least.
    """

    MOST_SPREAD = 10
    LEAST_MATCH = 0.1

    def __init__(self, power_of_two: PowerOfTwo, num_cached_blocks: Callable[[str], int]) -> None:
        self._power_of_two = power_of_two
        self._num_cached_blocks = num_cached_blocks

    def rank(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return negated prefixes, sizes, or the ranks of two choices, as the rule says."""
        loads = num_requests(replicas)
        sizes = _sizes(replicas, self._num_cached_blocks)
        if side == "decode" or max(loads) - min(loads) > self.MOST_SPREAD or not any(sizes):
            return self._power_of_two.rank(query, replicas, side)
        cached = [num_cached_tokens(replica) for replica in replicas]
        if max(cached) >= self.LEAST_MATCH * query.num_tokens:
            return [-float(num_tokens) for num_tokens in cached]
        return sizes


class AibrixRule:
    """The policy `prefix-cache` of AIBrix, whose variables are
    `AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT` 16 and
    `AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR` 2.

    If loads differ by more than 16, the least load wins. Otherwise the longest cached prefix wins among the
    replicas whose load is at most the mean and two standard deviations, of equal prefixes that with the least
    load; and if none of them has a prefix, the least load.
    """

    MOST_SPREAD = 16
    NUM_DEVIATIONS = 2

    def rank(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return loads, less a multiple of the prefixes where the rule follows them."""
        loads = num_requests(replicas)
        if side == "decode" or max(loads) - min(loads) > self.MOST_SPREAD:
            return loads
        most = statistics.fmean(loads) + self.NUM_DEVIATIONS * statistics.pstdev(loads)
        # A token counts more than any load, so loads decide among equal prefixes alone.
        token = max(loads) + 1.0
        return [
            load - token * num_cached_tokens(replica) if load <= most else load
            for replica, load in zip(replicas, loads, strict=True)
        ]


def _sizes(replicas: Sequence[ReplicaCost], num_cached_blocks: Callable[[str], int]) -> list[float]:
    return [float(num_cached_blocks(replica.state.report.identity.replica_id)) for replica in replicas]
