"""Where a running stream is moved to, and how that counts until the replicas report it."""

from __future__ import annotations

from collections import Counter

import pytest
from router_harness import RouterHarness, keys_of

from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.errors import NoReplicaError
from router.messages import RouteRequest


def ask(number: int = 0, num_tokens: int = 320, excluded: tuple[str, ...] = ("d0",)) -> RouteRequest:
    return RouteRequest(f"m{number}", RequestFacts("t"), keys_of("a", 10), num_tokens, 64, excluded=excluded)


def test_streams_that_move_at_once_are_spread_over_the_targets() -> None:
    harness = RouterHarness("p0", "d0", "d1", "d2", "d3")
    harness.router.members.set_leaving("d0")
    harness.load("d3", running=6)
    chosen = Counter(harness.router.route_move(ask(number, excluded=())) for number in range(12))
    assert chosen == {"d1": 6, "d2": 6}
    chosen += Counter(harness.router.route_move(ask(number, excluded=())) for number in range(12, 21))
    assert chosen == {"d1": 9, "d2": 9, "d3": 3}
    harness.router.check()


def test_neither_prefill_nor_leaving_nor_excluded_replicas_are_targets() -> None:
    harness = RouterHarness("p0", "d0", "d1", "b0")
    assert harness.router.route_move(ask(1, excluded=("d0", "b0"))) == "d1"
    harness.router.members.set_leaving("d1")
    assert harness.router.route_move(ask(2)) == "b0"
    harness.router.add_replica(ReplicaIdentity("b0", 1), "prefill")
    with pytest.raises(NoReplicaError):
        harness.router.route_move(ask(3))
    harness.router.add_replica(ReplicaIdentity("p0", 1), "decode")
    assert harness.router.route_move(ask(4)) == "p0"


def test_of_equal_targets_the_one_that_holds_the_prompt() -> None:
    harness = RouterHarness("d0", "d1", "d2", "d3")
    harness.store("d3", keys_of("a", 10))
    assert harness.router.route_move(ask()) == "d3"


def test_one_that_can_never_hold_it_is_no_target() -> None:
    harness = RouterHarness("d0", "d1")
    with pytest.raises(NoReplicaError):
        harness.router.route_move(ask(num_tokens=16 * 1000))


def test_a_move_counts_at_the_target_until_its_report_or_its_end() -> None:
    harness = RouterHarness("p0", "d0", "d1")
    decision = harness.route(keys_of("a", 10), 320, excluded=("d1",))
    harness.router.on_prefilled(decision.request_id)
    harness.load("d0", running=1, free=980)
    harness.clock.advance(1.0)
    harness.load("d0", running=1, free=980)
    moving = RouteRequest(decision.request_id, RequestFacts("t"), keys_of("a", 10), 330, 22, excluded=("d0",))
    assert harness.router.route_move(moving) == "d1"
    state = harness.router.loads.state
    assert (state("d0").num_sequences, state("d1").num_sequences) == (1, 1)
    assert state("d1").num_free_blocks == 1000 - 22
    harness.router.on_finished(decision.request_id)
    assert (state("d1").num_sequences, state("d1").num_free_blocks) == (0, 1000)
    harness.router.route_move(moving)
    harness.router.on_prefilled(decision.request_id)
    assert harness.router.tree.match(keys_of("a", 10)).device["d1"] == 10
    harness.clock.advance(1.0)
    harness.load("d1", running=1, free=978)
    assert (state("d1").num_sequences, state("d1").num_free_blocks) == (1, 978)
    harness.router.on_finished(decision.request_id)
    harness.router.check()
    assert harness.router.loads.num_placements == 0
