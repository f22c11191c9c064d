"""The roster: epochs fence lives, versions order views, and nothing is lost while its actor is away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import WAIT_S

from cluster.errors import RosterAwayError
from cluster.roster.actor import STARTING_CODEC, STARTING_S, RemoteRoster, RosterActor
from cluster.roster.introduction import INTRODUCTION_S, meet_gateways
from cluster.roster.messages import GatewayRecord, ReplicaRecord, SetDesired, StartingReplica, StoreRecord
from cluster.roster.state import (
    EXPIRE_S,
    REBUILD_S,
    LocalRoster,
    Roster,
    RosterClient,
    keep_registered,
)
from kvtransfer.common.clock import ManualClock, SystemClock
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity

COMPATIBILITY = CompatibilityRecord(1, b"f" * 16, "fp32", "fp32", 16, 4, 2, 32)


def replica(replica_id: str = "decode-a", epoch: int = 1, *, leaving: bool = False) -> ReplicaRecord:
    return ReplicaRecord(
        identity=ReplicaIdentity(replica_id, epoch),
        pool="decode",
        role="decode",
        address=f"127.0.0.1:{epoch}",
        model="tiny",
        compatibility=COMPATIBILITY,
        process_id=1,
        rank_process_ids=(2,),
        leaving=leaving,
    )


def gateway(epoch: int = 1) -> GatewayRecord:
    return GatewayRecord("gateway-a", epoch, f"127.0.0.1:{epoch}", 3)


def store(epoch: int = 1) -> StoreRecord:
    return StoreRecord("node-a", epoch, f"127.0.0.1:{epoch}", 4, "host")


def test_a_newer_life_replaces_an_older_and_never_the_reverse() -> None:
    roster = Roster()
    assert roster.register(replica(epoch=2), 0.0)
    assert not roster.register(replica(epoch=1), 0.0)
    assert roster.register(replica(epoch=3), 0.0)
    assert [record.identity.epoch for record in roster.view().replicas] == [3]


def test_a_removed_life_cannot_come_back_and_a_newer_can() -> None:
    roster = Roster()
    roster.register(gateway(5), 0.0)
    assert not roster.remove("gateway-a", 4)
    assert roster.remove("gateway-a", 5)
    assert roster.view().gateways == ()
    assert not roster.register(gateway(5), 0.0)
    assert roster.register(gateway(6), 0.0)


def test_a_restarted_store_takes_the_place_of_its_older_life() -> None:
    roster = Roster()
    assert roster.register(store(5), 0.0)
    assert roster.register(store(6), 0.0)
    assert not roster.register(store(5), 0.0)
    assert roster.view().stores == (store(6),)
    assert roster.expire(20.0, EXPIRE_S) == ["store-node-a"]
    assert roster.view().stores == ()
    assert roster.register(store(6), 20.0)
    assert roster.remove("store-node-a", 6)
    assert not roster.register(store(6), 21.0)


def test_only_so_many_removed_members_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.roster.state.NUM_REMOVED", 3)
    roster = Roster()
    for number in range(5):
        roster.remove(f"decode-{number}", 1)
    accepted = [roster.register(replica(f"decode-{number}", 1), 0.0) for number in range(5)]
    assert accepted == [True, True, False, False, False]


def test_the_version_grows_with_changes_and_only_with_them() -> None:
    roster = Roster(first_version=100)
    roster.register(replica(), 0.0)
    assert roster.version == 101
    roster.register(replica(), 1.0)
    assert roster.version == 101
    roster.register(replica(leaving=True), 2.0)
    assert roster.version == 102
    roster.change(SetDesired("decode", 2, pinned=False))
    roster.change(SetDesired("decode", 2, pinned=False))
    assert roster.version == 103
    assert roster.view().desired == {"decode": 2}


def test_members_that_do_not_renew_expire_and_may_return() -> None:
    roster = Roster()
    roster.register(replica("a"), 0.0)
    roster.register(replica("b"), 0.0)
    roster.register(replica("b"), 8.0)
    assert roster.expire(10.5, 10.0) == ["a"]
    assert [record.identity.replica_id for record in roster.view().replicas] == ["b"]
    assert roster.register(replica("a"), 11.0)


@given(st.lists(st.tuples(st.sampled_from(["register", "remove"]), st.integers(1, 6)), max_size=30))
def test_only_the_newest_life_that_was_not_removed_is_shown(actions: list[tuple[str, int]]) -> None:
    roster = Roster()
    shown, removed = 0, 0
    for action, epoch in actions:
        if action == "register":
            accepted = roster.register(replica(epoch=epoch), 0.0)
            assert accepted == (epoch >= shown and epoch > removed)
            shown = epoch if accepted else shown
        else:
            roster.remove("decode-a", epoch)
            removed = max(removed, epoch)
            shown = 0 if epoch >= shown else shown
        assert [record.identity.epoch for record in roster.view().replicas] == ([shown] if shown else [])


async def test_a_long_poll_wakes_on_change() -> None:
    roster = LocalRoster(ManualClock())
    waiting = asyncio.create_task(roster.view(0, 60.0))
    await roster.register(replica())
    view = await waiting
    assert view.version == 1
    assert [record.identity.replica_id for record in view.replicas] == ["decode-a"]


async def test_a_long_poll_without_change_returns_the_same_view() -> None:
    roster = LocalRoster(ManualClock())
    await roster.register(gateway())
    assert (await roster.view(1, 0.01)).version == 1
    assert (await roster.view(0, 60.0)).version == 1


class Wire:
    """Calls a `RosterActor` in this process as if it were elsewhere; None is an actor that is away."""

    def __init__(self, actor: RosterActor | None) -> None:
        self.actor = actor

    async def __call__(self, method: str, *arguments: object) -> object:
        if self.actor is None:
            raise RosterAwayError(method)
        result: object = await getattr(self.actor, method)(*arguments)
        return result


async def test_the_remote_roster_behaves_as_the_local_one() -> None:
    clock = SystemClock()
    clients: list[RosterClient] = [
        LocalRoster(clock),
        RemoteRoster(Wire(RosterActor(clock, restarted=False)), clock),
    ]
    for client in clients:
        assert await client.register(replica(epoch=2))
        assert await client.register(gateway())
        assert await client.register(store())
        assert not await client.register(replica(epoch=1))
        view = await client.view(0, 1.0)
        assert (view.gateways, view.stores) == ((gateway(),), (store(),))
        assert [record.identity for record in view.replicas] == [ReplicaIdentity("decode-a", 2)]
        waiting = asyncio.create_task(client.view(view.version, 60.0))
        await client.remove("decode-a", 2)
        assert (await waiting).replicas == ()


async def test_the_last_view_stays_while_the_actor_is_away() -> None:
    clock = ManualClock()
    wire = Wire(RosterActor(clock, restarted=False))
    client = RemoteRoster(wire, clock)
    await client.register(replica())
    view = await client.view(0, 1.0)
    wire.actor = None
    assert await client.register(replica())
    waiting = asyncio.create_task(client.view(view.version, 1.0))
    await asyncio.sleep(0)
    clock.advance(1.0)
    assert await waiting == view


async def test_a_restarted_actor_shows_its_view_only_when_filled() -> None:
    clock = ManualClock(start_s=1000.0)
    wire = Wire(RosterActor(clock, restarted=False))
    client = RemoteRoster(wire, clock)
    await client.register(replica("a"))
    await client.register(replica("b"))
    await client.change(SetDesired("decode", 3, True))
    before = await client.view(0, 1.0)

    clock.advance(1.0)
    wire.actor = RosterActor(clock, restarted=True)
    await client.register(replica("a"))
    early = asyncio.create_task(client.view(before.version, 1.0))
    await asyncio.sleep(0)
    clock.advance(1.0)
    assert await early == before

    await client.register(replica("b"))
    late = asyncio.create_task(client.view(before.version, 30.0))
    await asyncio.sleep(0)
    clock.advance(REBUILD_S)
    after = await late
    assert after.version > before.version
    assert after.replicas == before.replicas
    assert (after.desired, after.pinned) == ({"decode": 3}, ("decode",))


async def test_an_expired_member_disappears_from_the_view() -> None:
    clock = ManualClock()
    roster = LocalRoster(clock, expire_s=EXPIRE_S)
    await roster.register(replica())
    clock.advance(EXPIRE_S + 1)
    assert (await roster.view(0, 0.01)).replicas == ()


async def test_a_registration_is_renewed_until_its_life_is_over() -> None:
    clock = ManualClock()
    roster = LocalRoster(clock)
    renewing = asyncio.create_task(keep_registered(lambda: roster.register(replica()), clock, 2.0))
    await roster.view(0, 5.0)
    await roster.register(replica(epoch=2))
    clock.advance(2.0)
    await asyncio.wait_for(renewing, WAIT_S)


async def test_a_replica_is_introduced_when_every_gateway_has_connected() -> None:
    clock = ManualClock()
    roster = LocalRoster(clock)
    await roster.register(gateway(epoch=2))
    connected = {("gateway-a", 1)}  # of an earlier life
    meeting = asyncio.create_task(meet_gateways(roster, lambda: connected, clock))
    for _ in range(10):
        await asyncio.sleep(0)
        clock.advance(0.1)
    assert not meeting.done()
    connected.add(("gateway-a", 2))
    clock.advance(0.1)
    assert await asyncio.wait_for(meeting, WAIT_S) == []


async def test_a_gateway_that_never_connects_is_named_and_holds_no_replica_up() -> None:
    clock = ManualClock()
    roster = LocalRoster(clock)
    await roster.register(gateway())
    meeting = asyncio.create_task(meet_gateways(roster, set, clock))
    await asyncio.sleep(0)
    clock.advance(INTRODUCTION_S)
    assert await asyncio.wait_for(meeting, WAIT_S) == ["gateway-a"]


async def test_setting_a_count_while_the_actor_is_away_is_told() -> None:
    client = RemoteRoster(Wire(None), ManualClock())
    with pytest.raises(RosterAwayError):
        await client.change(SetDesired("decode", 2, True))


async def test_what_a_replica_starts_with_is_shown_while_it_is_told() -> None:
    clock = ManualClock()
    actor = RosterActor(clock, restarted=False)

    async def call(method: str, *arguments: Any) -> object:
        return await getattr(actor, method)(*arguments)

    roster = RemoteRoster(call, clock)
    version = (await roster.view(-1, 0.0)).version
    for phase in ("joined", "loading weights, 1 of 2 layers, 0.1 of 0.2 GB"):
        await roster.tell_start(StartingReplica("decode-a", "decode", phase))
    await roster.tell_start(StartingReplica("prefill-a", "prefill", "warming up"))
    clock.advance(STARTING_S - 1.0)
    await roster.tell_start(StartingReplica("prefill-a", "prefill", "ready"))
    assert [STARTING_CODEC.decode(frame).phase for frame in await actor.starting()] == [
        "loading weights, 1 of 2 layers, 0.1 of 0.2 GB",
        "ready",
    ]
    clock.advance(2.0)
    assert [STARTING_CODEC.decode(frame).replica_id for frame in await actor.starting()] == ["prefill-a"]
    assert (await roster.view(-1, 0.0)).version == version, "nobody who watches members is woken"


async def test_a_roster_that_is_away_or_older_does_not_keep_a_replica_from_starting() -> None:
    async def away(method: str, *arguments: Any) -> object:
        raise RosterAwayError("gone")

    async def older(method: str, *arguments: Any) -> object:
        raise AttributeError(method)

    for call in (away, older):
        await RemoteRoster(call, ManualClock()).tell_start(StartingReplica("a", "decode", "joined"))
