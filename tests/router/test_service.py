"""What routing promises: audits, exclusions, affinity, balance, and when the prefill pool is skipped."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from router_harness import BLOCK_TOKENS, RouterHarness, Tier, keys_of
from slow_cases import slow_but

from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.config import PolicyName, RouterConfig
from router.errors import NoReplicaError
from router.messages import RouteRequest
from router.policies.cost_policy import WORK_PART
from router.service import NUM_DECISIONS_KEPT

TIERS: tuple[Tier, ...] = ("device", "dram", "nvme")
POLICIES = get_args(PolicyName)


# -------------------------------------------------------------------------------- who may be chosen


@pytest.mark.parametrize("policy", slow_but(POLICIES, "tandem", "random", "predicted_only", "sglang"))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_only_usable_replicas_and_every_decision_can_be_audited(policy: str, data: st.DataObject) -> None:
    harness = RouterHarness(config=RouterConfig.model_validate({"policy": policy}))
    names = ["p0", "p1", "p2", "d0", "d1", "b0"]
    leaving: set[str] = set()
    alive: set[str] = set()
    for _ in range(30):
        name = data.draw(st.sampled_from(names))
        action = data.draw(st.sampled_from(["join", "leave", "go", "load", "store", "wait", *["route"] * 6]))
        if action == "join" and name not in alive:
            harness.join(name)
            alive.add(name)
        elif action == "leave" and name in alive:
            harness.router.members.set_leaving(name)
            leaving.add(name)
        elif action == "go":
            harness.router.remove_replica(name)
            alive.discard(name)
            leaving.discard(name)
        elif action == "load":
            backlog, running, free = (data.draw(st.integers(0, most)) for most in (5000, 9, 99))
            harness.load(name, backlog, running, free)
        elif action == "store" and name in alive:
            tier = data.draw(st.sampled_from(TIERS))
            harness.store(name, keys_of("shared", data.draw(st.integers(1, 20))), tier)
        elif action == "wait":
            harness.clock.advance(data.draw(st.sampled_from([0.01, 1.0, 6.0])))
        elif action == "route":
            excluded = data.draw(st.sampled_from([(), (name,), ("p0", "d0")]))
            usable = alive - leaving - set(excluded)
            num_blocks = data.draw(st.integers(0, 20))
            num_tokens = num_blocks * BLOCK_TOKENS + data.draw(st.integers(1, 15))
            if not usable & {"d0", "d1", "b0"}:
                with pytest.raises(NoReplicaError, match="no usable decode replica"):
                    harness.route(keys_of("shared", num_blocks), num_tokens, excluded)
                continue
            decision = harness.route(keys_of("shared", num_blocks), num_tokens, excluded)
            assert decision.decode in usable - {"p0", "p1", "p2"}
            assert decision.prefill in {"", *usable} - {"d0", "d1", decision.decode}
            finished = f"q{data.draw(st.integers(1, harness.num_requests))}"
            harness.router.on_prefilled(finished)
            if data.draw(st.booleans()):
                harness.router.on_finished(finished)
        harness.router.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_does_not_decode_is_computed_by_one_replica_of_any_role(policy: str) -> None:
    harness = RouterHarness("p0", "d0", "b0", config=RouterConfig.model_validate({"policy": policy}))
    decisions = [harness.route(decodes=False) for _ in range(30)]
    assert {decision.prefill for decision in decisions} == {""}
    # Reports say that nobody has work, and d0 is kept for streams.
    expected = {"p0", "b0"} if policy == "reported_only" else {"p0", "d0", "b0"}
    assert {decision.decode for decision in decisions} == expected
    assert harness.router.loads.state("p0").backlog_tokens >= 1000, "it is counted where it is computed"
    for excluded in ("p0", "d0", "b0"):
        assert harness.route(decodes=False, excluded=(excluded,)).decode != excluded
    for prefill, decode in (("p0", ""), ("", "p0")):
        decision = harness.route(decodes=False, pinned_prefill=prefill, pinned_decode=decode)
        assert (decision.prefill, decision.decode) == ("", "p0")
    with pytest.raises(
        NoReplicaError, match="no usable prefill or decode replica: 3 known, 0 leaving, 3 excl"
    ):
        harness.route(decodes=False, excluded=("p0", "d0", "b0"))
    harness.router.check()


def test_what_does_not_decode_goes_where_it_is_cached() -> None:
    harness = RouterHarness("p0", "p1", "d0")
    keys = keys_of("shared", 60)
    harness.store("p1", keys)
    assert harness.route(keys, decodes=False).decode == "p1"


def test_stale_load_is_the_last_choice() -> None:
    harness = RouterHarness("p0", "p1", "d0", "d1")
    harness.clock.advance(6.0)
    harness.load("p1", backlog=100_000)
    harness.load("d1", running=500)
    assert {(harness.route().prefill, harness.route().decode) for _ in range(5)} == {("p1", "d1")}
    stale = next(item for item in harness.route().candidates if item.replica_id == "p0")
    assert stale.note == "stale load"
    assert harness.route(excluded=("p1", "d1")).decode == "d0", "but it is a choice when there is no other"


def test_when_all_load_is_stale_the_rest_decides() -> None:
    harness = RouterHarness("p0", "p1", "d0", "d1")
    harness.clock.advance(6.0)
    assert harness.route(num_tokens=1000).prefill != "", (
        "silence of all is no reason to skip the prefill pool"
    )
    harness.load("p0")
    decision = harness.route(num_tokens=1000)
    assert (decision.prefill, decision.decode) in {("p0", "d0"), ("p0", "d1")}
    harness.load("d1")
    harness.clock.advance(0.1)
    harness.router.members.set_leaving("p0")
    assert (harness.route().prefill, harness.route().decode) == ("", "d1"), "alone where the load is known"


def test_a_replica_that_never_reported_is_the_last_choice() -> None:
    harness = RouterHarness("p0", "d0")
    harness.router.add_replica(ReplicaIdentity("p1", 1), "prefill")
    assert all(harness.route().prefill == "p0" for _ in range(5))


def test_missing_sides_are_named() -> None:
    with pytest.raises(NoReplicaError, match="no usable decode replica: 0 known"):
        RouterHarness("p0").route()
    harness = RouterHarness("p0", "d0", "d1")
    harness.router.members.set_leaving("d0")
    with pytest.raises(NoReplicaError, match="decode replica: 2 known, 1 leaving, 1 excluded"):
        harness.route(excluded=("d1",))
    with pytest.raises(NoReplicaError, match="prefill replica: 1 known, 0 leaving, 1 excluded; p0"):
        harness.route(excluded=("p0",), pinned_prefill="p0", pinned_decode="d1")


def test_pins_are_obeyed_at_any_cost() -> None:
    harness = RouterHarness("p0", "p1", "d0", "d1", "b0")
    harness.load("p1", backlog=10**6)
    harness.load("d1", running=300)
    decision = harness.route(num_tokens=10, pinned_prefill="p1", pinned_decode="d1")
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    assert harness.route(pinned_decode="d1").decode == "d1"
    alone = harness.route(pinned_prefill="b0", pinned_decode="b0")
    assert (alone.prefill, alone.decode) == ("", "b0")
    with pytest.raises(NoReplicaError, match="no second replica"):
        RouterHarness("b0").route(pinned_prefill="b0")


def test_streams_that_move_are_spread_where_one_more_costs_nothing() -> None:
    harness = RouterHarness("p0", "d0", "d1", "d2")
    for name in ("d0", "d1", "d2"):
        report = harness.router.loads.state(name).report
        harness.router.loads.on_load(replace(report, decode_base_s=0.01))
    moves = [
        RouteRequest(f"m{number}", RequestFacts("t"), (), num_tokens=100, max_new_tokens=10)
        for number in range(9)
    ]
    assert Counter(map(harness.router.route_move, moves)) == {"d0": 3, "d1": 3, "d2": 3}


def test_a_new_epoch_is_not_leaving_and_holds_nothing() -> None:
    harness = RouterHarness("p0", "d0")
    harness.store("p0", keys_of("x", 10))
    harness.router.members.set_leaving("p0")
    assert harness.route(keys_of("x", 10)).prefill == ""
    harness.join("p0", epoch=2)
    decision = harness.route(keys_of("x", 10))
    assert (decision.prefill, decision.prefill_cached_tokens) == ("p0", 0)


def test_replicas_that_are_not_usable_are_chosen_only_where_nothing_else_is_left() -> None:
    harness = RouterHarness("p0", "p1", "d0", "d1")
    harness.load("p1", backlog=5000)
    harness.load("d1", running=50)
    harness.router.members.set_usable("p0", False)
    harness.router.members.set_usable("d0", False)
    assert {(it.prefill, it.decode) for it in (harness.route() for _ in range(5))} == {("p1", "d1")}
    assert harness.route(excluded=("d1",)).decode == "d0"
    assert harness.route(pinned_prefill="p0", pinned_decode="d0").decode == "d0"
    move = RouteRequest("m", RequestFacts("t"), (), num_tokens=100, max_new_tokens=10)
    assert harness.router.route_move(move) == "d1"
    assert harness.router.route_move(replace(move, excluded=("d1",))) == "d0"
    harness.router.members.set_usable("p1", False)
    assert harness.route().prefill == "", "d1 is a whole engine"
    harness.router.members.set_usable("d1", False)
    assert harness.route().decode in ("d0", "d1")
    harness.router.members.set_usable("p0", True)
    harness.router.members.set_usable("d0", True)
    assert (harness.route().prefill, harness.route().decode) == ("p0", "d0")


def test_a_new_epoch_is_usable() -> None:
    harness = RouterHarness("d0", "d1")
    harness.router.members.set_usable("d0", False)
    assert {harness.route().decode for _ in range(4)} == {"d1"}
    harness.join("d0", epoch=2)
    harness.load("d1", running=100)
    assert harness.route().decode == "d0"


def test_a_role_can_change() -> None:
    harness = RouterHarness("b0", "b1")
    harness.router.add_replica(ReplicaIdentity("b0", 1), "prefill")
    assert all(harness.route().decode == "b1" for _ in range(4))
    with pytest.raises(ValueError, match="role must be one of"):
        harness.router.add_replica(ReplicaIdentity("b0", 1), "encode")


# ------------------------------------------------------------------------------ where the prefix is


def test_requests_follow_their_prefix() -> None:
    harness = RouterHarness("p0", "p1", "p2", "d0", "d1")
    harness.store("p2", keys_of("x", 50))
    harness.store("d1", keys_of("x", 30))
    decision = harness.route(keys_of("x", 60), num_tokens=60 * BLOCK_TOKENS + 3)
    assert (decision.prefill, decision.decode) == ("p2", "d1")
    assert decision.prefill_cached_tokens == 50 * BLOCK_TOKENS
    assert decision.decode_cached_tokens == 30 * BLOCK_TOKENS


def test_a_prefix_is_not_worth_any_queue() -> None:
    harness = RouterHarness("p0", "p1", "d0")
    harness.store("p0", keys_of("x", 50))
    harness.load("p0", backlog=2 * 50 * BLOCK_TOKENS)
    assert harness.route(keys_of("x", 60), num_tokens=960).prefill == "p1"


def test_one_token_is_always_computed() -> None:
    harness = RouterHarness("p0", "d0")
    harness.store("d0", keys_of("x", 4))
    decision = harness.route(keys_of("x", 4), num_tokens=4 * BLOCK_TOKENS)
    assert decision.decode_cached_tokens == 4 * BLOCK_TOKENS - 1


def test_siblings_go_together_then_spread() -> None:
    """A burst of one prefix and short suffixes, before any event or report: the first ones share a replica,
    and the next replica is opened when the queue costs more than the prefix."""
    harness = RouterHarness("p0", "p1", "p2", "p3", "d0")
    prefix = keys_of("shared", 100)
    chosen = [
        harness.route((*prefix, b"own %d" % number), 101 * BLOCK_TOKENS).prefill for number in range(300)
    ]
    together = int(WORK_PART * 101)
    assert len(set(chosen[:together])) == 1, "as many suffixes of a block as the work of the prefix is worth"
    counts = Counter(chosen)
    assert len(counts) == 4
    assert max(counts.values()) - min(counts.values()) <= 2 * together
    for number in range(1, 301):
        harness.router.on_finished(f"q{number}")
    harness.clock.advance(60.0)
    for replica in ("p0", "p1", "p2", "p3", "d0"):
        harness.load(replica)
    assert len({harness.route((b"%d" % number,), 1000).prefill for number in range(4)}) == 4, (
        "no load is left"
    )


def test_strangers_spread_evenly() -> None:
    harness = RouterHarness("p0", "p1", "p2", "p3", "d0", "d1")
    decisions = [harness.route(keys_of(f"{number:06}", 60)) for number in range(80)]
    assert set(Counter(item.prefill for item in decisions).values()) == {20}
    assert set(Counter(item.decode for item in decisions).values()) == {40}


# ---------------------------------------------------------------------------- what the store holds


# --------------------------------------------------------------------- whether the prefill pool is used


def test_a_long_prompt_uses_the_prefill_pool_even_when_all_is_idle() -> None:
    decision = RouterHarness("p0", "d0").route(num_tokens=1000)
    assert (decision.prefill, decision.decode) == ("p0", "d0")


def test_a_short_remainder_stays_at_the_decode_side() -> None:
    harness = RouterHarness("p0", "d0", "d1", config=RouterConfig(skip_prefill_tokens=64))
    harness.load("d0", running=50)
    harness.load("d1", running=50)
    harness.store("d1", keys_of("x", 60))
    assert harness.route(keys_of("x", 60), num_tokens=60 * BLOCK_TOKENS + 64).prefill == ""
    assert harness.route(keys_of("x", 60), num_tokens=60 * BLOCK_TOKENS + 65).prefill == "p0"
    assert harness.route((), num_tokens=64).prefill == "", "a short prompt too"


def test_a_remainder_stays_when_the_prefill_queue_costs_more() -> None:
    harness = RouterHarness("p0", "d0", config=RouterConfig(skip_prefill_tokens=0))
    harness.load("d0", running=4)
    for backlog, prefill in ((0, "p0"), (4000, "p0"), (6000, "")):
        harness.load("p0", backlog=backlog)
        assert harness.route(num_tokens=1000).prefill == prefill
        harness.router.on_finished(f"q{harness.num_requests}")


def test_a_hand_over_is_not_taken_for_held_before_its_first_token() -> None:
    """Else the second of two siblings would be sent to compute everything at the decode side."""
    harness = RouterHarness("p0", "d0")
    keys = keys_of("x", 60)
    assert harness.route(keys, num_tokens=965).prefill == "p0"
    assert harness.route(keys, num_tokens=965).prefill == "p0"
    harness.router.on_prefilled("q1")
    assert harness.route(keys, num_tokens=965).prefill == ""
    harness.clock.advance(5.0)
    harness.load("p0")
    harness.load("d0")
    assert harness.route(keys, num_tokens=965).prefill == "p0", "no event ever confirmed it"


def test_a_request_that_was_sent_back_leaves_no_prefix_behind() -> None:
    """Or it would go back to the same replica, as if nothing were to compute there. What a sibling computes
    stays, and so does a prompt that was computed."""
    harness = RouterHarness("b0", "b1")
    keys = keys_of("x", 60)
    first = harness.route(keys, num_tokens=965)
    harness.router.on_finished("q1")
    again = harness.route(keys, num_tokens=965)
    assert (first.prefill_cached_tokens, again.prefill_cached_tokens) == (0, 0)
    sibling = harness.route(keys, num_tokens=965)
    assert sibling.prefill_cached_tokens == 960
    harness.router.on_finished("q3")
    later = harness.route(keys, num_tokens=965)
    assert (later.decode, later.prefill_cached_tokens) == (again.decode, 960)
    harness.router.on_prefilled("q2")
    for name in ("q2", "q4"):
        harness.router.on_finished(name)
    assert harness.route(keys, num_tokens=965).prefill_cached_tokens == 960
    harness.router.check()


def test_without_prefill_replicas_decode_replicas_serve_alone() -> None:
    harness = RouterHarness("d0", "d1")
    assert {harness.route().prefill for _ in range(4)} == {""}


def test_both_replicas_serve_alone_and_take_turns() -> None:
    harness = RouterHarness("b0", "b1")
    decisions = [harness.route() for _ in range(6)]
    assert {item.prefill for item in decisions} == {""}
    assert Counter(item.decode for item in decisions) == {"b0": 3, "b1": 3}


def test_free_space_comes_before_everything_on_the_decode_side() -> None:
    harness = RouterHarness("p0", "d0", "d1")
    harness.load("d0", running=0, free=10)
    harness.load("d1", running=200)
    decision = harness.route(num_tokens=1000)
    assert decision.decode == "d1"
    full = next(item for item in decision.candidates if (item.replica_id, item.side) == ("d0", "decode"))
    assert full.note == "no space now"


# ---------------------------------------------------------------------------------------- the record


def test_the_last_decisions_are_kept() -> None:
    harness = RouterHarness("p0", "d0")
    for _ in range(NUM_DECISIONS_KEPT + 3):
        harness.route()
    assert harness.router.explain("q3") is None
    assert harness.router.explain("q4") is not None


def test_the_same_seed_makes_the_same_random_decisions() -> None:
    config = RouterConfig(policy="random")
    harnesses = [RouterHarness("p0", "p1", "p2", "d0", "d1", config=config) for _ in range(2)]
    runs = [
        [(item.prefill, item.decode) for item in (harness.route() for _ in range(50))]
        for harness in harnesses
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 6


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefers_capacity", [False, True])
def test_only_a_choice_by_cost_says_with_which_backlog_another_is_better(
    policy: str, prefers_capacity: bool
) -> None:
    """The ranks of plain policies are no seconds, and who was refused once is not to be sent back again."""
    harness = RouterHarness("p0", "p1", "d0", config=RouterConfig.model_validate({"policy": policy}))
    harness.router.set_shared(True)
    for name in ("p0", "p1", "d0"):
        harness.load(name)
    request = RouteRequest("q", RequestFacts("t"), (), 5000, 10)
    decision = harness.router.route(request, prefers_capacity=prefers_capacity)
    assert (decision.most_backlog_tokens is not None) == (policy == "tandem" and not prefers_capacity)


def test_round_robin_takes_turns_on_each_side() -> None:
    harness = RouterHarness("p0", "p1", "p2", "d0", "d1", config=RouterConfig(policy="round_robin"))
    decisions = [harness.route() for _ in range(6)]
    assert [item.prefill for item in decisions] == ["p0", "p1", "p2"] * 2
    assert [item.decode for item in decisions] == ["d0", "d1"] * 3


# ----------------------------------------------------------------------------------------- capacity


def test_who_has_capacity_goes_before_who_is_cheaper() -> None:
    harness = RouterHarness("b0", "b1", config=RouterConfig(steps_ahead=2.5))
    # b0 has more than 2.5 steps of 512 tokens, and all of the prompt but its last block.
    harness.load("b0", backlog=1300)
    harness.load("b1", backlog=1200)
    harness.store("b0", keys_of("shared", 62))
    keys = keys_of("shared", 62)
    assert harness.route(keys).decode == "b0"
    assert harness.route(keys, prefers_capacity=True).decode == "b1"
    assert harness.route(keys, excluded=("b1",), prefers_capacity=True).decode == "b0", "a place is a place"


def test_both_replicas_of_a_pair_have_capacity() -> None:
    harness = RouterHarness("p0", "p1", "d0", "d1")
    harness.load("p0", backlog=5000)
    harness.load("d0", backlog=5000)
    harness.load("d1", running=64)
    for _ in range(4):
        decision = harness.route(prefers_capacity=True)
        assert (decision.prefill, decision.decode) == ("p1", "d0")
        harness.router.on_finished(decision.request_id)
    harness.load("d0", running=1, free=5)  # fewer blocks than the prompt needs
    harness.load("d1", running=63)
    assert harness.route(prefers_capacity=True).decode == "d1"


def test_what_waits_for_a_share_of_the_kv_takes_no_capacity_from_others() -> None:
    harness = RouterHarness("b0")
    harness.load("b0")
    for _ in range(6):
        harness.route(limited_group="a", num_tokens=2000)
    first, others = "q1", harness.route(is_queued=True)
    of_another = harness.route(is_queued=True, limited_group="c").request_id
    own = harness.route(is_queued=True, limited_group="a").request_id
    for _ in range(2):
        router = harness.router
        assert router.has_capacity(others.request_id)
        assert router.has_capacity(of_another)
        assert not router.has_capacity(own)
        assert router.waits_for_share(own)
        assert router.members.takes_more("b0")
        router.check()
        harness.clock.advance(0.1)
        harness.load("b0", backlog=12_000)  # the report shows them now
    harness.load("b0", backlog=30_000)
    assert not harness.router.has_capacity(others.request_id)
    assert not harness.router.has_capacity(own)
    assert not harness.router.waits_for_share(own), "others are before it too"
    harness.load("b0", backlog=9_000)
    harness.router.on_prefilled(first)
    harness.router.on_finished("q2")
    assert harness.router.loads.sent_backlog_tokens("b0", "") == 1000
    assert harness.router.loads.sent_backlog_tokens("b0", "a") == 9000
    assert harness.router.has_capacity(others.request_id)
    harness.router.check()


def test_a_replica_that_refused_has_no_capacity_until_it_is_heard_again() -> None:
    harness = RouterHarness("b0", "b1")
    decision = harness.route(excluded=("b1",))
    assert harness.router.has_capacity(decision.request_id)
    harness.clock.advance(0.1)
    assert harness.router.members.takes_more("b0")
    harness.router.on_refused("b0")
    assert not harness.router.has_capacity(decision.request_id)
    assert not harness.router.members.takes_more("b0")
    assert harness.route(prefers_capacity=True).decode == "b1"
    harness.clock.advance(0.1)
    harness.load("b0")
    assert harness.router.has_capacity(decision.request_id)
    assert harness.router.members.takes_more("b0")
    harness.router.on_refused("unheard-of")
    harness.router.on_refused("b0")
    harness.router.remove_replica("b0")
    harness.join("b0", epoch=2)
    assert harness.router.has_capacity(harness.route(excluded=("b1",)).request_id)


# ------------------------------------------------------------------------------------- what is held


def test_a_request_that_is_held_for_long_still_waits_for_its_replica() -> None:
    """However long its class allows: it is not taken for one whose end was lost."""
    harness = RouterHarness("b0")
    harness.load("b0", backlog=100_000)
    harness.route(is_queued=True)
    held = f"q{harness.num_requests}"
    assert not harness.router.has_capacity(held)
    for _ in range(4):
        harness.clock.advance(100.0)
        harness.load("b0", backlog=100_000)
        harness.route()
        harness.router.on_finished(f"q{harness.num_requests}")
        assert not harness.router.has_capacity(held)
    assert harness.router.loads.state("b0").num_queued_tokens > 0
    harness.router.on_submitted(held)
    assert harness.router.loads.state("b0").num_queued_tokens == 0
    harness.router.on_finished(held)
    harness.router.check()
    assert harness.router.num_placements == 0


def test_what_was_decided_and_not_placed_leaves_nothing_behind() -> None:
    harness = RouterHarness("b0")
    request = RouteRequest("q", RequestFacts("t"), keys_of("p", 100), 100 * BLOCK_TOKENS, 8)
    for _ in range(2):
        decision = harness.router.decide(request)
        assert decision.prefill_cached_tokens == 0
    assert harness.router.num_placements == 0
    assert harness.router.explain("q") is None
    harness.router.check()


def test_siblings_of_a_request_that_is_held_follow_it_for_as_long_as_it_is() -> None:
    """Longer than a prediction lasts; and not when it ends, or waits for another replica."""
    harness = RouterHarness("b0", "b1")
    keys, num_tokens = keys_of("p", 100), 100 * BLOCK_TOKENS
    held = RouteRequest("held", RequestFacts("t"), keys, num_tokens, 8)
    sibling = RouteRequest("sibling", RequestFacts("t"), keys, num_tokens, 8)
    at = harness.router.route(held, is_queued=True).decode
    other = ({"b0", "b1"} - {at}).pop()
    harness.clock.advance(60.0)
    harness.load("b0")
    harness.load("b1")
    decision = harness.router.decide(sibling)
    assert (decision.decode, decision.prefill_cached_tokens) == (at, num_tokens - 1)
    # For itself it has computed nothing.
    assert harness.router.decide(held).prefill_cached_tokens == 0
    harness.router.check()
    harness.load(at, backlog=1_000_000)
    moved = harness.router.improve(held, decision)
    assert moved is not None
    assert moved.decode == other
    harness.router.place(held, moved, is_queued=True)
    harness.load(at)
    decision = harness.router.decide(sibling)
    assert (decision.decode, decision.prefill_cached_tokens) == (other, num_tokens - 1)
    harness.router.on_finished("held")
    assert harness.router.decide(sibling).prefill_cached_tokens == 0
    harness.router.check()


def test_what_was_sent_is_predicted_and_what_waited_with_it_still_expected() -> None:
    harness = RouterHarness("b0")
    keys, num_tokens = keys_of("p", 100), 100 * BLOCK_TOKENS
    requests = {name: RouteRequest(name, RequestFacts("t"), keys, num_tokens, 8) for name in ("a", "b", "c")}
    for name in ("a", "b"):
        harness.router.route(requests[name], is_queued=True)
    assert harness.router.decide(requests["c"]).prefill_cached_tokens == num_tokens - 1
    harness.router.on_submitted("a")
    harness.router.on_finished("b")
    harness.router.check()
    assert harness.router.decide(requests["c"]).prefill_cached_tokens == num_tokens - 1
    harness.clock.advance(6.0)  # nothing has confirmed it
    assert harness.router.decide(requests["c"]).prefill_cached_tokens == 0
    harness.router.check()
