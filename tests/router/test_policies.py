"""Each policy against its rule, in words or as a naive model, and what all of them have in common."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import ValidationError
from router_harness import RouterHarness, keys_of

from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.config import PolicyName, RouterConfig
from router.current_load import CurrentLoad
from router.messages import ReplicaLoad, RouteRequest
from router.policies.cheapest_choice import choose
from router.policies.consistent_hash import ConsistentHash, affinity_key
from router.policies.cost_policy import CostPolicy
from router.policies.known_policies import is_priced, make_policy
from router.policies.plain_policy import PlainPolicy, Side, num_cached_tokens
from router.policies.power_of_two import PowerOfTwo
from router.policies.replica_cost import ReplicaCost, RouteQuery, replica_cost
from router.policies.seeded_random import SeededRandom
from router.policies.threshold_rules import AibrixRule, RayRule, SglangRule
from router.rates import rates_of
from router.service import RouterService

BLOCK = 16
NUM_TOKENS = 100 * BLOCK
QUERY = RouteQuery(NUM_TOKENS, 32, 1, BLOCK, 64, True)


def replica(index: int, num_requests: int, num_matched: int, *, is_stale: bool = False) -> ReplicaCost:
    """A prefill replica with so many requests that holds so many of the prompt's 100 blocks."""
    identity = ReplicaIdentity(f"p{index}", 1)
    report = ReplicaLoad(identity, 0.0, 0, num_requests, 0, 0, 100, 100, 1e4, 0.02, 1e5)
    state = CurrentLoad("prefill", report, 0, num_requests, 100, rates_of(report, num_requests))
    return replica_cost(QUERY, state, is_stale, num_matched, 0, 0)


drawn_replicas = st.lists(st.tuples(st.integers(0, 150), st.integers(0, 99)), min_size=1, max_size=8).map(
    lambda drawn: [replica(index, *each) for index, each in enumerate(drawn)]
)
sides = st.sampled_from(("prefill", "local"))


def held_blocks(replica_id: str) -> int:
    """How many blocks a replica has reported: some number that depends on its id."""
    return 7 * int(replica_id[1:]) % 5


def chosen(ranks: list[float]) -> int:
    return ranks.index(min(ranks))


def loads(replicas: list[ReplicaCost]) -> list[int]:
    return [each.state.num_requests for each in replicas]


# ------------------------------------------------------------------------------------- threshold rules


@given(drawn_replicas, sides)
def test_sglang(replicas: list[ReplicaCost], side: Side) -> None:
    best = chosen(SglangRule(held_blocks).rank(QUERY, replicas, side))
    most, least = max(loads(replicas)), min(loads(replicas))
    cached = list(map(num_cached_tokens, replicas))
    if most - least > 64 and most > 1.5 * least:
        assert replicas[best].state.num_requests == least
    elif max(cached) / NUM_TOKENS > 0.3:
        assert cached[best] == max(cached)
    else:
        sizes = [held_blocks(f"p{index}") for index in range(len(replicas))]
        assert sizes[best] == min(sizes)


@given(drawn_replicas, sides, st.booleans())
def test_ray(replicas: list[ReplicaCost], side: Side, has_cached: bool) -> None:
    power = PowerOfTwo(SeededRandom(1))
    rule = RayRule(power, held_blocks if has_cached else lambda replica_id: 0)
    best = chosen(rule.rank(QUERY, replicas, side))
    sizes = [held_blocks(f"p{index}") for index in range(len(replicas))]
    cached = list(map(num_cached_tokens, replicas))
    if max(loads(replicas)) - min(loads(replicas)) > 10 or not has_cached or not any(sizes):
        assert best == chosen(PowerOfTwo(SeededRandom(1)).rank(QUERY, replicas, side))
    elif max(cached) / NUM_TOKENS >= 0.1:
        assert cached[best] == max(cached)
    else:
        assert sizes[best] == min(sizes)


@given(drawn_replicas, sides)
def test_aibrix(replicas: list[ReplicaCost], side: Side) -> None:
    best = chosen(AibrixRule().rank(QUERY, replicas, side))
    counts, cached = loads(replicas), list(map(num_cached_tokens, replicas))
    order = sorted(range(len(replicas)), key=lambda index: (-cached[index], counts[index]))
    most = statistics.fmean(counts) + 2 * statistics.pstdev(counts)
    able = [index for index in order if cached[index] and counts[index] <= most]
    if max(counts) - min(counts) > 16 or not able:
        assert counts[best] == min(counts)
    else:
        assert (cached[best], counts[best]) == (cached[able[0]], counts[able[0]])


@given(drawn_replicas)
def test_threshold_rules_choose_decode_replicas_by_load(replicas: list[ReplicaCost]) -> None:
    for rule in (SglangRule(held_blocks), AibrixRule()):
        assert rule.rank(QUERY, replicas, "decode") == loads(replicas)
    ranks = RayRule(PowerOfTwo(SeededRandom(3)), held_blocks).rank(QUERY, replicas, "decode")
    assert ranks == PowerOfTwo(SeededRandom(3)).rank(QUERY, replicas, "decode")


# -------------------------------------------------------------------------- two choices and hashing


@given(drawn_replicas, st.integers(0, 2**64))
def test_of_two_that_are_drawn_the_one_with_fewer_requests_is_chosen(
    replicas: list[ReplicaCost], seed: int
) -> None:
    ranks = PowerOfTwo(SeededRandom(seed)).rank(QUERY, replicas, "prefill")
    drawn = [index for index, rank in enumerate(ranks) if rank < 2]
    assert len(drawn) == min(2, len(replicas))
    assert ranks.count(0.0) == 1
    best = chosen(ranks)
    assert loads(replicas)[best] == min(loads(replicas)[index] for index in drawn)


def test_two_choices_draw_every_replica_but_stale_ones() -> None:
    replicas = [replica(index, 0, 0, is_stale=index == 2) for index in range(5)]
    power = PowerOfTwo(SeededRandom(1))
    counts = Counter(chosen(power.rank(QUERY, replicas, "prefill")) for _ in range(400))
    assert set(counts) == {0, 1, 3, 4}
    assert min(counts.values()) > 60


def test_consistent_hashing_moves_the_keys_of_a_replica_that_is_gone_and_no_others() -> None:
    ranker, replicas = ConsistentHash(), [replica(index, 0, 0) for index in range(6)]
    queries = [QUERY._replace(affinity_key=str(number).encode()) for number in range(300)]
    before = [chosen(ranker.rank(query, replicas, "prefill")) for query in queries]
    after = [chosen(ranker.rank(query, replicas[:5], "prefill")) for query in queries]
    assert min(Counter(before).values()) > 25
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 5)
    assert len({new for old, new in zip(before, after, strict=True) if old == 5}) == 5


@given(drawn_replicas, st.binary(max_size=16))
def test_consistent_hashing_keeps_loads_bounded(replicas: list[ReplicaCost], key: bytes) -> None:
    best = chosen(ConsistentHash().rank(QUERY._replace(affinity_key=key), replicas, "prefill"))
    assert loads(replicas)[best] < 1.25 * (sum(loads(replicas)) + 1) / len(replicas) + 1


def test_requests_are_hashed_by_session_or_by_the_beginning_of_the_prompt() -> None:
    keys = keys_of("a", 40)
    assert affinity_key("talk", keys, BLOCK, "q") == b"talk"
    assert affinity_key("", keys, BLOCK, "q") == keys[15], "256 tokens"
    assert affinity_key("", keys[:3], BLOCK, "q") == keys[2]
    assert affinity_key("", keys, 512, "q") == keys[0]
    assert affinity_key("", (), BLOCK, "q") == b"q"


# ----------------------------------------------------------------------------------- parts of a load


def test_by_predictions_alone_reports_do_not_count() -> None:
    harness = RouterHarness("p0", "p1", "d0", config=RouterConfig(policy="predicted_only"))
    harness.load("p0", backlog=100_000)
    first = harness.route(num_tokens=5000)
    assert first.prefill == "p0"
    assert [harness.route(num_tokens=5000).prefill for _ in range(3)] == ["p1", "p0", "p1"]
    # The first token ends what is to compute, and the report does not.
    harness.clock.advance(1.0)
    harness.load("p1")
    harness.router.on_prefilled(first.request_id)
    assert harness.route(num_tokens=5000).prefill == "p0"
    for number in range(1, harness.num_requests + 1):
        harness.router.on_finished(f"q{number}")
    assert {item.queue_s for item in harness.route().candidates} == {0.0}
    harness.router.check()


def test_a_waiting_request_does_not_count_for_its_own_decision() -> None:
    harness = RouterHarness("b0", "b1", config=RouterConfig(policy="predicted_only"))
    request = RouteRequest("q", RequestFacts("t"), (), 5000, 10)
    decision = harness.router.route(request, is_queued=True)
    assert harness.router.improve(request, decision) is None, "it would wait for itself"
    again = harness.router.decide(request)
    assert {item.queue_s for item in again.candidates} == {0.0}
    harness.router.on_submitted("q")
    other = RouteRequest("q2", RequestFacts("t"), (), 5000, 10)
    assert harness.router.decide(other).decode != decision.decode
    harness.router.check()


def test_by_reports_alone_placements_do_not_count() -> None:
    harness = RouterHarness("p0", "p1", "d0", config=RouterConfig(policy="reported_only"))
    harness.load("p0", backlog=1000)
    keys = keys_of("shared", 60)
    decisions = [harness.route(keys, num_tokens=5000) for _ in range(5)]
    assert {decision.prefill for decision in decisions} == {"p1"}, "a burst follows the last report"
    assert {decision.prefill_cached_tokens for decision in decisions} == {0}, "and nothing is foreseen"
    harness.load("p1", backlog=2000)
    assert harness.route(keys, num_tokens=5000).prefill == "p0"
    harness.router.check()


# ------------------------------------------------------------------------------- all of the policies


@given(
    st.sampled_from([name for name in get_args(PolicyName) if name != "tandem"]),
    st.lists(st.tuples(st.sampled_from(["prefill", "both", "decode"]), st.integers(0, 90)), max_size=7),
    st.booleans(),
    st.integers(0, 99),
)
def test_candidates_are_those_that_may_be_chosen(
    name: str, drawn: list[tuple[str, int]], may_stay: bool, num_matched: int
) -> None:
    """Whatever a policy prefers, it prices each replica for its side alone, and finds a choice."""
    config = RouterConfig.model_validate({"policy": name})
    policy = make_policy(config, 1, turn_of=lambda replica_id: 0, num_cached_blocks=held_blocks)
    query = QUERY._replace(may_stay=may_stay)
    replicas = []
    for index, (role, load) in enumerate([*drawn, ("decode", 3), ("prefill", 3)]):
        made = replica(index, load, num_matched if index % 2 else 0)
        replicas.append(made._replace(state=made.state._replace(role=role)))
    prefills = [each for each in replicas if each.state.role != "decode"]
    decodes = [each for each in replicas if each.state.role != "prefill"]
    candidates = policy.candidates(query, prefills, decodes)
    able = {
        "prefill": {each.state.report.identity.replica_id for each in prefills},
        "decode": {each.state.report.identity.replica_id for each in decodes},
    }
    for item in candidates:
        assert item.replica_id in able["decode" if item.side == "local" else item.side]
        assert item.side != "local" or may_stay
    choice = choose(candidates)
    assert choice is not None
    assert choice.decode in able["decode"]
    assert choice.prefill in {"", *able["prefill"]} - {choice.decode}


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_the_priced_policies_are_those_that_price(name: PolicyName) -> None:
    config = RouterConfig(policy=name)
    policy = make_policy(config, 1, turn_of=lambda replica_id: 0, num_cached_blocks=held_blocks)
    assert is_priced(name) == isinstance(policy, CostPolicy)


def test_a_stale_replica_is_the_last_choice_of_every_plain_policy() -> None:
    for name in get_args(PolicyName):
        config = RouterConfig.model_validate({"policy": name})
        policy = make_policy(config, 1, turn_of=lambda replica_id: 0, num_cached_blocks=held_blocks)
        if not isinstance(policy, PlainPolicy):
            continue
        stale, busy = replica(0, 0, 90, is_stale=True), replica(1, 2_000_000, 0)
        busy = busy._replace(state=busy.state._replace(backlog_tokens=10**9))
        decode = replica(2, 0, 0)
        decode = decode._replace(state=decode.state._replace(role="decode"))
        for _ in range(10):
            choice = choose(policy.candidates(QUERY, [stale, busy], [decode]))
            assert choice is not None
            assert choice.prefill == "p1"


def test_cost_is_the_former_name_of_tandem() -> None:
    assert RouterConfig.model_validate({"policy": "cost"}).policy == "tandem"
    assert RouterConfig().policy == "tandem"
    with pytest.raises(ValidationError, match="policy"):
        RouterConfig.model_validate({"policy": "fastest"})


def test_gateways_take_turns_by_themselves_and_begin_at_different_replicas() -> None:
    firsts = set()
    for gateway in ("g0", "g1", "g2", "g3", "g4", "g5"):
        config = RouterConfig(policy="round_robin")
        router = RouterService(config, BLOCK, ManualClock(), 1, salt=gateway)
        router.set_shared(True)
        for index in range(4):
            router.add_replica(ReplicaIdentity(f"b{index}", 1), "both")
        requests = [RouteRequest(f"{number}", RequestFacts("t"), (), 40, 8) for number in range(12)]
        decodes = [router.route(request).decode for request in requests]
        assert len(set(decodes[:4])) == 4
        assert decodes == 3 * decodes[:4]
        firsts.add(decodes[0])
    assert len(firsts) > 1


def test_gateways_agree_on_consistent_hashing() -> None:
    config = RouterConfig(policy="consistent_hash")
    routers = [RouterService(config, BLOCK, ManualClock(), seed, salt=f"g{seed}") for seed in range(3)]
    for router in routers:
        router.set_shared(True)
        for index in range(5):
            router.add_replica(ReplicaIdentity(f"b{index}", 1), "both")
    for number in range(20):
        request = RouteRequest("q", RequestFacts("t"), keys_of(f"prompt {number}", 4), 70, 8)
        assert len({router.decide(request).decode for router in routers}) == 1


def test_requests_are_counted_with_prompts_that_another_replica_decodes() -> None:
    harness = RouterHarness("p0", "p1", "d0", config=RouterConfig(policy="least_loaded"))
    decisions = [harness.route(num_tokens=5000) for _ in range(4)]
    state = harness.router.loads.state
    assert [state(name).num_requests for name in ("p0", "p1", "d0")] == [2, 2, 4]
    harness.router.on_prefilled(decisions[0].request_id)
    assert state(decisions[0].prefill).num_requests == 1
    report = state("p1").report
    harness.router.loads.on_load(replace(report, num_waiting=5, received_at=harness.clock.now()))
    assert state("p1").num_requests >= 5
    harness.router.check()
