"""Role leases: epochs grow, the highest holds, and a replica that is gone or unknown does not keep one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from cluster.roster.desired_state import DesiredState
from cluster.roster.messages import ReplicaRecord, RoleLease, RosterView
from cluster.scaling.roles import RoleTable, role_of
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity

WALL = 1000.0


def replica(
    name: str,
    home: str = "prefill",
    *,
    role: str = "",
    epoch: int = 1,
    role_epoch: int = 0,
    leaving: bool = False,
) -> ReplicaRecord:
    return ReplicaRecord(
        identity=ReplicaIdentity(name, epoch),
        pool=home,
        role=role or home,
        address="127.0.0.1:1",
        model="tiny",
        compatibility=CompatibilityRecord(1, b"f" * 16, "fp32", "fp32", 16, 4, 2, 32),
        process_id=1,
        rank_process_ids=(2,),
        leaving=leaving,
        home_role=home,
        role_epoch=role_epoch,
    )


def book(*replicas: ReplicaRecord, leases: tuple[RoleLease, ...] = (), wall: float = WALL) -> RoleTable:
    return RoleTable(RosterView(version=1, replicas=replicas, leases=leases), wall)


def test_a_lease_is_of_its_time_and_says_why() -> None:
    lease = book(replica("p0")).assign("p0", "decode", "nothing to prefill")
    assert lease == RoleLease(ReplicaIdentity("p0", 1), "decode", 1_000_000, "nothing to prefill")


def test_epochs_grow_over_leases_and_roles_of_any_replica_and_over_a_clock_that_was_set_back() -> None:
    leases = (RoleLease(ReplicaIdentity("p1", 1), "decode", 5_000_000, ""),)
    chosen = book(replica("p0"), replica("p1", role_epoch=7_000_000), leases=leases)
    epochs = [chosen.assign("p0", "decode", "").epoch, chosen.restore("p1", "").epoch]  # type: ignore[union-attr]
    assert epochs == [7_000_001, 7_000_002]


def test_what_cannot_be_lent_is_not() -> None:
    chosen = book(replica("p0", leaving=True), replica("p1"))
    assert chosen.assign("p0", "decode", "") is None
    assert chosen.assign("gone", "decode", "") is None
    assert chosen.assign("p1", "prefill", "") is None
    assert chosen.assign("p1", "decode", "") is not None
    assert chosen.assign("p1", "decode", "") is None


def test_a_recall_is_for_lent_replicas_alone_and_takes_those_that_have_not_switched_yet() -> None:
    ordered = RoleLease(ReplicaIdentity("p0", 1), "decode", 10, "")
    switched = RoleLease(ReplicaIdentity("p1", 1), "decode", 11, "")
    chosen = book(
        replica("p0"), replica("p1", role="decode", role_epoch=11), replica("p2"), leases=(ordered, switched)
    )
    assert chosen.assigned() == {"p0": 0.010, "p1": 0.011}
    recalled = chosen.restore_all("a scale order")
    assert [(lease.replica.replica_id, lease.role) for lease in recalled] == [
        ("p0", "prefill"),
        ("p1", "prefill"),
    ]
    assert chosen.assigned() == {}
    assert chosen.restore_all("again") == []


def test_the_lease_of_a_life_that_is_over_is_dropped_and_not_followed() -> None:
    old = RoleLease(ReplicaIdentity("p0", 1), "decode", 10, "")
    gone = RoleLease(ReplicaIdentity("p9", 1), "decode", 11, "")
    chosen = book(replica("p0", epoch=2), leases=(old, gone))
    assert chosen.expired() == [ReplicaIdentity("p0", 1), ReplicaIdentity("p9", 1)]
    assert chosen.assigned() == {}


def test_a_lent_replica_whose_lease_was_forgotten_goes_home() -> None:
    chosen = book(replica("p0", role="decode", role_epoch=77), replica("p1"))
    (lease,) = chosen.strays()
    assert (lease.replica.replica_id, lease.role) == ("p0", "prefill")
    assert lease.epoch > 77
    assert chosen.strays() == []


def test_a_replica_follows_only_newer_leases_of_its_own_life() -> None:
    me = ReplicaIdentity("p0", 2)
    leases = (
        RoleLease(ReplicaIdentity("p0", 1), "decode", 90, ""),
        RoleLease(ReplicaIdentity("p1", 2), "decode", 91, ""),
        RoleLease(me, "decode", 92, ""),
    )
    view = RosterView(version=1, leases=leases)
    assert role_of(me, view, 0) == ("decode", 92)
    assert role_of(me, view, 92) is None
    assert role_of(ReplicaIdentity("p0", 3), view, 0) is None
    assert role_of(me, RosterView(version=2), 92) is None


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["lend", "recall", "lose"]), st.integers(0, 2), st.booleans())))
def test_a_replica_that_sees_leases_late_ends_where_the_last_one_says(
    steps: list[tuple[str, int, bool]],
) -> None:
    """Against a naive model: the roles as they were ordered, and replicas that look only now and then."""
    state = DesiredState()
    ordered = {f"p{number}": "prefill" for number in range(3)}
    played = {name: ("prefill", 0) for name in ordered}

    def view() -> RosterView:
        records = tuple(
            replica(name, role=role, role_epoch=epoch) for name, (role, epoch) in sorted(played.items())
        )
        return state.fill(RosterView(version=1, replicas=records))

    def look(name: str) -> None:
        if (found := role_of(ReplicaIdentity(name, 1), view(), played[name][1])) is not None:
            assert found[1] > played[name][1]
            played[name] = found

    for what, number, looks in steps:
        name = f"p{number}"
        chosen = RoleTable(view(), WALL)
        if what == "lose":  # a roster that forgot everything; strays are sent home
            state = DesiredState()
            for lease in RoleTable(view(), WALL).strays():
                state.change(lease)
            ordered = dict.fromkeys(ordered, "prefill")
        else:
            granted = chosen.assign(name, "decode", "") if what == "lend" else chosen.restore(name, "")
            assert granted is None or state.change(granted)
            ordered[name] = "decode" if what == "lend" else "prefill"
        if looks:
            look(name)
    for name in ordered:
        look(name)
    assert {name: role for name, (role, _) in played.items()} == ordered
