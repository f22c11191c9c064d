"""Requests that wait move where they would wait less, and away from replicas that leave or are avoided."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from admission_world import AdmissionWorld
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.admission.admission import MOST_PER_PUMP
from cluster.admission.config import AdmissionConfig
from cluster.admission.queue_placement import QueuePlacement
from cluster.admission.queued_request import QueuedRequest


def test_what_waits_moves_only_where_it_would_wait_less() -> None:
    """With queues of equal length it stays where it is, however often it is looked at."""
    world = AdmissionWorld(num_replicas=2)
    requests = [world.arrive(str(index), service_class="batch") for index in range(16)]
    for _ in range(2):
        for server in world.servers.values():
            server.slowness = 1e6  # nothing ends meanwhile
    at = {it.request_id: it.decision.decode for it in requests if it is not None}
    assert set(at.values()) == {"r0", "r1"}
    for _ in range(60):
        world.clock.advance(10.0)
        for server in world.servers.values():
            world.router.loads.on_load(server.load())
        world.admission.pump()
    waiting = [it for it in requests if it is not None and it.request_id not in world.released]
    assert len(waiting) > 10
    assert {it.request_id: it.decision.decode for it in waiting} == {
        it.request_id: at[it.request_id] for it in waiting
    }


def test_what_waits_for_a_replica_that_leaves_waits_for_others() -> None:
    """In the order and within the bounds of all that wait there: nothing is sent to the leaver, and the other
    is not flooded."""
    world = AdmissionWorld(num_replicas=2)
    requests = [it for index in range(6) if (it := world.arrive(str(index))) is not None]
    assert len(world.released) == 2
    waiting = [it for it in requests if it.request_id not in world.released]
    assert {it.decision.decode for it in waiting} == {"r0", "r1"}
    world.router.members.set_leaving("r0")
    world.admission.leave("r0")
    assert len(world.released) == 2
    assert {it.decision.decode for it in waiting} == {"r1"}
    assert {(prefill, decode) for _, prefill, decode in world.moved} == {("", "r1")}
    assert len(world.admission.waiting) == 4
    world.run()
    assert len(world.released) == 6
    assert world.servers["r0"].num_submitted == 1


def test_without_another_replica_its_task_is_told_so() -> None:
    world = AdmissionWorld()
    for index in range(4):
        world.arrive(str(index))
    world.router.remove_replica("r0")
    world.admission.leave("r0")
    assert {*world.unplaced} == {"1", "2", "3"}
    assert len(world.admission.waiting) == 0
    assert [it.request_id for it in world.router.own_placements()] == ["0"]


def test_what_waits_for_a_replica_that_is_avoided_waits_for_others() -> None:
    """In pools: the decode replica that stands still was full by its last report, as the other still is."""
    world = AdmissionWorld(names=("p0", "d0", "d1"))
    for name in ("d0", "d1"):
        world.servers[name].num_running = 1000
        world.router.loads.on_load(world.servers[name].load())
    requests = [it for index in range(8) if (it := world.arrive(str(index))) is not None]
    assert not world.released
    assert {it.decision.decode for it in requests} == {"d0", "d1"}
    world.router.members.set_usable("d0", False)
    world.admission.leave("d0")
    assert {it.decision.decode for it in requests} == {"d1"}
    world.servers["d1"].num_running = 0
    world.router.loads.on_load(world.servers["d1"].load())
    world.admission.pump("d1")
    assert world.released
    # The only one that is left is not left.
    world.servers["d1"].num_running = 1000
    world.router.loads.on_load(world.servers["d1"].load())
    world.router.members.set_usable("d1", False)
    before = len(world.moved)
    world.admission.leave("d1")
    assert len(world.admission.waiting) == len(requests) - len(world.released)
    assert not [at for at in world.moved[before:] if at[2] == "d1"]


def test_while_one_request_finds_out_whether_a_replica_is_well_the_others_wait() -> None:
    world = AdmissionWorld(num_replicas=2)
    for server in world.servers.values():
        server.num_running = 1000
        world.router.loads.on_load(server.load())
    requests = [it for index in range(5) if (it := world.arrive(str(index), num_tokens=10)) is not None]
    world.router.members.set_usable("r1", False)
    world.admission.leave("r1")
    assert {it.decision.decode for it in requests} == {"r0"}
    world.router.members.set_usable("r1", True)
    world.router.members.set_usable("r0", False)
    world.servers["r0"].num_running = 0
    world.router.loads.on_load(world.servers["r0"].load())
    world.admission.pump()
    assert not world.released, "they wait for a replica that has capacity, and is not usable"
    world.router.members.set_usable("r0", True)
    world.admission.pump("r0")
    assert len(world.released) == 5
    world.router.members.set_usable("r0", False)
    world.router.members.set_usable("r1", False)
    assert world.router.members.takes_more("r0") is False
    assert world.arrive("alone", num_tokens=10) is not None
    assert "alone" in world.released, "where nothing else is left it goes there"


# ---------------------------------------------------------------------------- turns of the event loop

# What may wait for long, whatever the others are given.
PATIENT = AdmissionConfig.model_validate({"batch": {"max_wait_s": 10_000.0, "aging_s": 9_000.0}})


def crowd(world: AdmissionWorld, num_requests: int, tenants: str = "ab") -> list[QueuedRequest]:
    """Let requests come of which the replicas take very few."""
    for server in world.servers.values():
        server.slowness = 1e6
    requests = [
        world.arrive(f"{tenants[index % len(tenants)]}-{index}", 1000, tenants[index % len(tenants)], "batch")
        for index in range(num_requests)
    ]
    return [it for it in requests if it is not None and it.request_id not in world.released]


def counted_moves(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """Count how many requests a call looks at again, each of which takes some hundred microseconds."""
    num_moves = 0
    move: Any = QueuePlacement.move

    def counting(self: QueuePlacement, queued: QueuedRequest, now: float) -> bool:
        nonlocal num_moves
        num_moves += 1
        return bool(move(self, queued, now))

    monkeypatch.setattr(QueuePlacement, "move", counting)

    def of(call: Callable[[], object]) -> int:
        before = num_moves
        call()
        return num_moves - before

    return of


def test_one_turn_of_the_loop_places_few_of_those_that_wait_for_a_replica_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = AdmissionWorld(num_replicas=2, config=PATIENT)
    waiting = [it for it in crowd(world, 200) if it.decision.decode == "r0"]
    assert len(waiting) > 4 * MOST_PER_PUMP
    moves = counted_moves(monkeypatch)
    num_taken = world.servers["r0"].num_submitted
    world.router.remove_replica("r0")
    turns = [moves(lambda: world.admission.leave("r0"))]
    now = world.clock.now()
    while world.has_due(now):
        turns.append(moves(world.step))
    # With one that is next in the longest queue, for each replica that nothing waits for.
    assert max(turns) <= MOST_PER_PUMP + 2
    assert len(turns) >= len(waiting) / MOST_PER_PUMP
    assert {it.decision.decode for it in waiting} == {"r1"}
    assert world.servers["r0"].num_submitted == num_taken


def test_the_first_that_are_placed_are_those_whose_turns_come_first() -> None:
    world = AdmissionWorld(num_replicas=2, config=PATIENT)
    waiting = [it.request_id for it in crowd(world, 200, "aaaaaaab") if it.decision.decode == "r0"]
    world.router.members.set_leaving("r0")
    world.admission.leave("r0")
    moved = [name for name, _, _ in world.moved]
    assert len(moved) == MOST_PER_PUMP < len(waiting)
    by_tenant = {tenant: [name for name in waiting if name[0] == tenant] for tenant in "ab"}
    half = MOST_PER_PUMP // 2
    assert len(by_tenant["b"]) >= half
    assert {*moved} == {*by_tenant["a"][:half], *by_tenant["b"][:half]}


def test_what_reaches_its_bound_at_once_is_refused_in_several_turns() -> None:
    world = AdmissionWorld(config=PATIENT)
    waiting = crowd(world, 100)
    world.clock.advance(20_000.0)
    world.admission.pump()
    num_refused = [0, len(world.refused)]
    while world.has_due(world.clock.now()):
        world.step()
        num_refused.append(len(world.refused))
    assert max(after - before for before, after in itertools.pairwise(num_refused)) <= MOST_PER_PUMP
    assert num_refused[-1] == len(waiting)


def test_many_that_a_replica_takes_at_once_go_in_several_turns() -> None:
    world = AdmissionWorld(config=PATIENT)
    world.servers["r0"].num_running = 1000
    world.router.loads.on_load(world.servers["r0"].load())
    for index in range(100):
        world.arrive(str(index), 1, service_class="batch")
    assert not world.released
    world.servers["r0"].num_running = 0
    world.router.loads.on_load(world.servers["r0"].load())
    world.admission.pump()
    assert len(world.released) == MOST_PER_PUMP
    world.run(world.clock.now())
    assert len(world.released) == 100


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), min_size=1, max_size=60),
    st.lists(st.tuples(st.sampled_from(["leave", "avoid", "drop", "step", "arrive"]), st.integers(0, 2))),
)
def test_whatever_leaves_while_others_are_still_placed_nothing_goes_to_who_is_gone(
    arrivals: list[tuple[str, int]], events: list[tuple[str, int]]
) -> None:
    world = AdmissionWorld(num_replicas=4, config=PATIENT)
    for server in world.servers.values():
        server.slowness = 100.0
    requests = [
        it
        for index, (tenant, tokens) in enumerate(arrivals)
        if (it := world.arrive(f"{index}", 100 * tokens, tenant, "batch")) is not None
    ]
    gone: Counter[str] = Counter()
    for number, (event, index) in enumerate(events):
        name = f"r{index}"
        if event == "leave" and name not in gone:
            gone[name] = world.servers[name].num_submitted
            world.router.members.set_leaving(name)
            world.admission.leave(name)
        elif event == "avoid":
            world.router.members.set_usable(name, number % 2 == 0)
            world.admission.leave(name)
        elif event == "drop" and requests:
            requests.pop().close()
        elif event == "arrive":
            world.arrive(f"later-{number}", 500, "a", "batch")
        elif world.has_due(world.clock.now() + 1.0):
            world.step()
        world.admission.check()
        assert all(world.servers[name].num_submitted == num_taken for name, num_taken in gone.items())
    world.run(world.clock.now())
    assert not world.unplaced
    waiting = [it for it in requests if it.request_id not in world.ended]
    assert not [it for it in waiting if it.decision.decode in gone]


def test_a_flood_that_may_use_a_part_of_the_kv_keeps_nobody_else_waiting() -> None:
    """It may wait at the replica for its share, and has 2.5 steps of 100 tokens there like all others."""
    world = AdmissionWorld()
    for index in range(8):
        world.arrive(f"a{index}", num_tokens=100, tenant="a", kv_share=0.3)
    assert list(world.released) == ["a0", "a1", "a2"]
    for index in range(4):
        world.arrive(f"b{index}", num_tokens=100, tenant="b")
    assert list(world.released) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    world.arrive("c0", num_tokens=100, tenant="c", kv_share=0.3)
    assert "c0" not in world.released, "what may use all of it is before it"
    world.run()
    assert len(world.first_token_at) == 13
