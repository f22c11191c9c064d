"""What the roster remembers outlives it: nothing told to a new life is overridden, nothing else is lost."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from cluster.errors import RosterAwayError
from cluster.roster.actor import RemoteRoster, RosterActor
from cluster.roster.desired_state import NUM_MOVES, DesiredState
from cluster.roster.messages import (
    DropLease,
    ForgetPool,
    Observed,
    ReleasePool,
    RoleLease,
    RosterView,
    ScalingChange,
    SetDesired,
    SetTraffic,
)
from cluster.roster.state import LocalRoster, ScalingRoster
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity

P0 = ReplicaIdentity("p0", 1)


def move(at: float, after: int = 2) -> ScalingChange:
    return ScalingChange(at, "decode", 1, after, "operator", "wanted")


def lease(epoch: int, replica: ReplicaIdentity = P0, role: str = "decode") -> RoleLease:
    return RoleLease(replica, role, epoch, "idle")


def state_view(state: DesiredState, version: int) -> RosterView:
    return state.fill(RosterView(version=version))


class Wire:
    """Calls a `RosterActor` in this process as if it were elsewhere."""

    def __init__(self, actor: RosterActor) -> None:
        self.actor: RosterActor | None = actor

    async def __call__(self, method: str, *arguments: object) -> object:
        if self.actor is None:
            raise RosterAwayError(method)
        result: object = await getattr(self.actor, method)(*arguments)
        return result


async def tell_everything(roster: ScalingRoster) -> None:
    await roster.change(SetDesired("decode", 3, True))
    await roster.change(SetDesired("prefill", 2, False))
    await roster.change(lease(5))
    await roster.change(move(1.0))
    await roster.change(SetTraffic({"tandem": 0.9, "tandem-v2": 0.1}))
    await roster.change(Observed("mark", {"decode": 3, "prefill": 1}, {"decode": 1}))


def assert_everything(view: RosterView) -> None:
    assert (view.desired, view.pinned) == ({"decode": 3, "prefill": 2}, ("decode",))
    assert (view.leases, view.moves) == ((lease(5),), (move(1.0),))
    assert view.traffic == {"tandem": 0.9, "tandem-v2": 0.1}
    assert (view.deploy_mark, view.targets) == ("mark", {"decode": 3, "prefill": 1})


async def test_local_and_remote_rosters_remember_what_they_are_told() -> None:
    clock = ManualClock(start_s=1000.0)
    rosters: list[ScalingRoster] = [
        LocalRoster(clock),
        RemoteRoster(Wire(RosterActor(clock, restarted=False)), clock),
    ]
    for roster in rosters:
        await tell_everything(roster)
        view = await roster.view(0, 0.0)
        assert_everything(view)
        await tell_everything(roster)
        assert (await roster.view(0, 0.0)).version == view.version
        await roster.change(ReleasePool("decode"))
        await roster.change(ForgetPool("prefill"))
        await roster.change(DropLease(P0))
        after = await roster.view(0, 0.0)
        assert (after.desired, after.pinned, after.leases) == ({"decode": 3}, (), ())
        assert after.version > view.version


async def test_a_restarted_roster_is_given_everything_before_anybody_sees_it() -> None:
    clock = ManualClock(start_s=1000.0)
    wire = Wire(RosterActor(clock, restarted=False))
    watcher = RemoteRoster(wire, clock)
    await tell_everything(watcher)
    before = await watcher.view(0, 0.0)
    clock.advance(1.0)
    wire.actor = RosterActor(clock, restarted=False)
    after = await watcher.view(0, 0.0)
    assert after.version > before.version
    assert after.incarnation != before.incarnation
    assert_everything(after)
    newcomer = RemoteRoster(wire, clock)
    assert_everything(await newcomer.view(0, 0.0))


async def test_a_roster_that_goes_away_again_is_not_shown_half_filled() -> None:
    clock = ManualClock(start_s=1000.0)
    first, second = RosterActor(clock, restarted=False), RosterActor(ManualClock(2000.0), restarted=False)
    wire = Wire(first)
    watcher = RemoteRoster(wire, clock)
    await tell_everything(watcher)
    before = await watcher.view(0, 0.0)

    class BreaksBeforeItIsFilled(Wire):
        async def __call__(self, method: str, *arguments: object) -> object:
            if method == "restore":
                raise RosterAwayError(method)
            return await super().__call__(method, *arguments)

    watcher._call = BreaksBeforeItIsFilled(second)
    looking = asyncio.create_task(watcher.view(0, 0.0))
    await asyncio.sleep(0)
    clock.advance(1.0)
    assert await looking == before
    watcher._call = Wire(second)
    assert_everything(await watcher.view(0, 0.0))


def test_what_a_new_life_was_told_goes_before_any_memory() -> None:
    old = DesiredState(0)
    old.change(SetDesired("decode", 3, pinned=True))
    old.change(SetDesired("prefill", 2, pinned=True))
    old.change(lease(5))
    old.change(SetTraffic({"a": 1.0}))
    old.change(Observed("old", {"decode": 3}, {"decode": 1}))
    new = DesiredState(100)
    new.change(SetDesired("decode", 1, pinned=False))
    new.change(ForgetPool("prefill"))
    new.change(lease(6, role="prefill"))
    new.change(SetTraffic({}))
    new.change(Observed("new", {}, {}))
    assert not new.restore(state_view(old, 50))
    view = state_view(new, 101)
    assert (view.desired, view.pinned, view.traffic) == ({"decode": 1}, (), {})
    assert (view.leases, view.deploy_mark) == ((lease(6, role="prefill"),), "new")


def test_the_latest_memory_counts_whatever_the_order_of_arrival() -> None:
    old = DesiredState(0)
    old.change(SetDesired("decode", 3, pinned=True))
    old.change(SetDesired("extra", 9, pinned=True))
    old.change(move(1.0))
    early = state_view(old, 10)
    old.change(SetDesired("decode", 4, pinned=True))
    old.change(ForgetPool("extra"))
    old.change(lease(5))
    old.change(move(2.0))
    late = state_view(old, 20)
    for memories in ((early, late), (late, early), (late, early, late)):
        new = DesiredState(100)
        for memory in memories:
            new.restore(memory)
        view = state_view(new, 101)
        assert (view.desired, view.leases) == ({"decode": 4}, (lease(5),))
        assert view.moves == (move(1.0), move(2.0))


def test_a_roster_is_never_restored_from_its_own_life() -> None:
    roster = DesiredState(100)
    roster.change(SetDesired("decode", 3, pinned=True))
    memory = state_view(roster, 100)
    roster.change(ForgetPool("decode"))
    assert not roster.restore(memory)
    assert state_view(roster, 101).desired == {}


def test_only_the_latest_moves_are_remembered() -> None:
    state = DesiredState()
    for number in range(NUM_MOVES + 5):
        state.change(move(float(number)))
    moves = state_view(state, 1).moves
    assert [item.at for item in moves] == [float(number) for number in range(5, NUM_MOVES + 5)]


def test_a_lease_gives_way_to_higher_epochs_and_newer_lives_alone() -> None:
    state = DesiredState()
    assert state.change(lease(5))
    assert not state.change(lease(5, role="prefill"))
    assert not state.change(lease(4, role="prefill"))
    assert state.change(lease(6, role="prefill"))
    assert not state.change(DropLease(ReplicaIdentity("p0", 0)))
    assert state.change(lease(7, ReplicaIdentity("p0", 2)))
    assert not state.change(DropLease(P0))
    assert state.change(DropLease(ReplicaIdentity("p0", 2)))


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.sampled_from("ab"), st.integers(0, 3), st.booleans()),
            st.tuples(st.sampled_from(["release", "forget"]), st.sampled_from("ab")),
            st.tuples(st.sampled_from(["restart", "watch", "restore"]), st.integers(0, 1)),
        ),
        max_size=40,
    )
)
def test_after_a_restart_every_order_that_a_watcher_saw_is_there_again(
    steps: list[tuple[object, ...]],
) -> None:
    """Against a naive model: what was told and seen by a watcher counts, unless told otherwise since."""
    version = 0
    state = DesiredState(0)
    truth: dict[str, tuple[int, bool]] = {}
    told: set[str] = set()
    memories: list[tuple[RosterView, dict[str, tuple[int, bool]]]] = [(RosterView(version=-1), {})] * 2
    for step in steps:
        version += 1
        match step:
            case ("set", str(pool), int(count), bool(pinned)):
                state.change(SetDesired(pool, count, pinned=pinned))
                truth[pool] = (count, pinned)
                told.add(pool)
            case ("release", str(pool)):
                state.change(ReleasePool(pool))
                if pool in truth and truth[pool][1]:
                    truth[pool] = (truth[pool][0], False)
                    told.add(pool)
            case ("forget", str(pool)):
                state.change(ForgetPool(pool))
                truth.pop(pool, None)
                told.add(pool)
            case ("watch", int(number)):
                memories[number] = (state_view(state, version), dict(truth))
            case ("restart", _):
                version += 100
                state, truth, told = DesiredState(version), {}, set()
                latest = max(memories, key=lambda memory: memory[0].version)
                for view, _ in sorted(memories, key=lambda memory: memory[0].version):
                    state.restore(view)
                truth = dict(latest[1])
            case ("restore", int(number)):
                before = state_view(state, version)
                state.restore(memories[number][0])
                assert state_view(state, version) == before
        view = state_view(state, version)
        assert {pool: (num, pool in view.pinned) for pool, num in view.desired.items()} == truth
