"""Requests that wait move where they would wait less, and away from replicas that leave or are avoided."""

from __future__ import annotations

from admission_world import AdmissionWorld


def test_what_waits_moves_only_where_it_would_wait_less() -> None:
    """With queues of equal length it stays where it is, however often it is looked at."""
    world = AdmissionWorld(num_replicas=2)
    held = [world.arrive(str(index), service_class="batch") for index in range(16)]
    for _ in range(2):
        for server in world.servers.values():
            server.slowness = 1e6  # nothing ends meanwhile
    at = {it.request.request_id: it.decision.decode for it in held if it is not None}
    assert set(at.values()) == {"r0", "r1"}
    for _ in range(60):
        world.clock.advance(10.0)
        for server in world.servers.values():
            world.router.on_load(server.load())
        world.admission.pump()
    waiting = [it for it in held if it is not None and it.request.request_id not in world.released]
    assert len(waiting) > 10
    assert {it.request.request_id: it.decision.decode for it in waiting} == {
        it.request.request_id: at[it.request.request_id] for it in waiting
    }


def test_what_waits_for_a_replica_that_leaves_waits_for_others() -> None:
    """In the order and within the bounds of all that wait there: nothing is sent to the leaver, and the other
    is not flooded."""
    world = AdmissionWorld(num_replicas=2)
    held = [it for index in range(6) if (it := world.arrive(str(index))) is not None]
    assert len(world.released) == 2
    waiting = [it for it in held if it.request.request_id not in world.released]
    assert {it.decision.decode for it in waiting} == {"r0", "r1"}
    world.router.set_leaving("r0")
    world.admission.leave("r0")
    assert len(world.released) == 2
    assert {it.decision.decode for it in waiting} == {"r1"}
    assert {(prefill, decode) for _, prefill, decode in world.moved} == {("", "r1")}
    assert len(world.admission) == 4
    world.run()
    assert len(world.released) == 6
    assert world.servers["r0"].num_taken == 1


def test_without_another_replica_its_task_is_told_so() -> None:
    world = AdmissionWorld()
    for index in range(4):
        world.arrive(str(index))
    world.router.remove_replica("r0")
    world.admission.leave("r0")
    assert {*world.unplaced} == {"1", "2", "3"}
    assert len(world.admission) == 0
    assert [it.request_id for it in world.router.own_placements()] == ["0"]


def test_what_waits_for_a_replica_that_is_avoided_waits_for_others() -> None:
    """In pools: the decode replica that stands still was full by its last report, as the other still is."""
    world = AdmissionWorld(names=("p0", "d0", "d1"))
    for name in ("d0", "d1"):
        world.servers[name].num_running = 1000
        world.router.on_load(world.servers[name].load())
    held = [it for index in range(8) if (it := world.arrive(str(index))) is not None]
    assert not world.released
    assert {it.decision.decode for it in held} == {"d0", "d1"}
    world.router.set_usable("d0", False)
    world.admission.leave("d0")
    assert {it.decision.decode for it in held} == {"d1"}
    world.servers["d1"].num_running = 0
    world.router.on_load(world.servers["d1"].load())
    world.admission.pump("d1")
    assert world.released
    # The only one that is left is not left.
    world.servers["d1"].num_running = 1000
    world.router.on_load(world.servers["d1"].load())
    world.router.set_usable("d1", False)
    before = len(world.moved)
    world.admission.leave("d1")
    assert len(world.admission) == len(held) - len(world.released)
    assert not [at for at in world.moved[before:] if at[2] == "d1"]


def test_while_one_request_finds_out_whether_a_replica_is_well_the_others_wait() -> None:
    world = AdmissionWorld(num_replicas=2)
    for server in world.servers.values():
        server.num_running = 1000
        world.router.on_load(server.load())
    held = [it for index in range(5) if (it := world.arrive(str(index), num_tokens=10)) is not None]
    world.router.set_usable("r1", False)
    world.admission.leave("r1")
    assert {it.decision.decode for it in held} == {"r0"}
    world.router.set_usable("r1", True)
    world.router.set_usable("r0", False)
    world.servers["r0"].num_running = 0
    world.router.on_load(world.servers["r0"].load())
    world.admission.pump()
    assert not world.released, "they wait for a replica that has capacity, and is not usable"
    world.router.set_usable("r0", True)
    world.admission.pump("r0")
    assert len(world.released) == 5
    world.router.set_usable("r0", False)
    world.router.set_usable("r1", False)
    assert world.router.takes_more("r0") is False
    assert world.arrive("alone", num_tokens=10) is not None
    assert "alone" in world.released, "where nothing else is left it goes there"
