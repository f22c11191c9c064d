"""Every policy by the name that the configuration gives it."""

from __future__ import annotations

from collections.abc import Callable

from router.config import PolicyName, RouterConfig
from router.policies.consistent_hash import ConsistentHash
from router.policies.cost_policy import CostPolicy
from router.policies.plain_policy import PlainPolicy, Ranker
from router.policies.power_of_two import PowerOfTwo
from router.policies.routing_policy import RoutingPolicy
from router.policies.seeded_random import SeededRandom
from router.policies.simple_ranks import LeastLoaded, LongestPrefix, RandomChoice, RoundRobin
from router.policies.threshold_rules import AibrixRule, RayRule, SglangRule

_PRICED: frozenset[PolicyName] = frozenset({"tandem", "predicted_only", "reported_only"})


def is_priced(policy: PolicyName) -> bool:
    """Whether the policy chooses by `CostPolicy`, with what more or less is known of replicas."""
    return policy in _PRICED


def make_policy(
    config: RouterConfig,
    seed: int,
    *,
    turn_of: Callable[[str], int],
    num_cached_blocks: Callable[[str], int],
) -> RoutingPolicy:
    """Make the configured policy. `turn_of` returns a number by which the replica that was chosen longest ago
    comes first, and `num_cached_blocks` how many blocks a replica has reported."""
    random = SeededRandom(seed)
    name_to_ranker: dict[str, Ranker] = {
        "round_robin": RoundRobin(turn_of),
        "random": RandomChoice(random),
        "least_loaded": LeastLoaded(),
        "power_of_two": PowerOfTwo(random),
        "longest_prefix": LongestPrefix(),
        "consistent_hash": ConsistentHash(),
        "sglang": SglangRule(num_cached_blocks),
        "ray": RayRule(PowerOfTwo(random), num_cached_blocks),
        "aibrix": AibrixRule(),
    }
    ranker = name_to_ranker.get(config.policy)
    return CostPolicy(config.decode_steps) if ranker is None else PlainPolicy(ranker)
