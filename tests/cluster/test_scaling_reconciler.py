"""Whose count is right: the keeper against a naive model of who wished what, through all restarts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reconciler_harness import NOBODY, House

from cluster.roster.state import DesiredState
from cluster.scaling.reconciler import SETTLE_S, Reconciler


def test_nothing_is_done_while_serve_has_what_the_configuration_says() -> None:
    house = House({"decode": 1})
    house.look()
    house.look()
    assert (house.desired, house.told, house.pulls) == ({}, [], [])


def test_an_operators_order_is_the_desired_count_pins_the_pool_and_recalls_lent_replicas() -> None:
    house = House({"decode": 1, "prefill": 1})
    house.look()
    house.targets["decode"] = 3
    house.look()
    assert (house.desired, house.pinned) == ({"decode": 3}, ("decode",))
    assert house.told == [("decode", 1, 3, "operator")]
    assert (house.num_recalls, house.pulls) == (1, [])
    house.look()
    assert (house.num_recalls, len(house.told)) == (1, 1)


def test_an_order_made_before_the_first_look_counts() -> None:
    house = House({"decode": 1})
    house.targets["decode"] = 3
    house.look()
    assert (house.desired, house.pinned) == ({"decode": 3}, ("decode",))


def test_a_deploy_resets_the_count_and_it_is_restored() -> None:
    house = House({"decode": 1})
    house.look()
    house.targets["decode"] = 3
    house.look()
    house.deploy("m1", {"decode": 1})
    house.look()
    assert house.targets == {"decode": 3}
    assert house.told[1:] == [("decode", 1, 3, "deploy")]
    house.look(SETTLE_S)
    house.look(SETTLE_S)
    assert (house.pinned, len(house.told)) == (("decode",), 2)


def test_a_reset_that_comes_a_moment_after_the_mark_is_restored_too() -> None:
    house = House({"decode": 1})
    house.targets["decode"] = 3
    house.look()
    house.mark = "m1"
    house.look()
    house.targets["decode"] = 1
    house.look()
    assert house.targets == {"decode": 3}


def test_once_a_deploy_has_settled_the_configured_count_is_an_order_as_any() -> None:
    house = House({"decode": 1})
    house.targets["decode"] = 3
    house.look()
    house.deploy("m1", {"decode": 1})
    house.look()
    house.look(SETTLE_S)
    house.targets["decode"] = 1
    house.look()
    assert (house.targets, house.desired) == ({"decode": 1}, {"decode": 1})
    assert house.told[-1] == ("decode", 3, 1, "operator")


def test_a_deploy_that_says_another_count_does_not_move_a_pinned_pool_and_moves_a_released_one() -> None:
    house = House({"decode": 1, "prefill": 1})
    house.targets |= {"decode": 3, "prefill": 4}
    house.look()
    house.wishes.release("prefill")
    house.deploy("m1", {"decode": 2, "prefill": 2})
    house.look()
    assert house.targets == {"decode": 3, "prefill": 2}
    assert house.desired == {"decode": 3}
    assert ("prefill", 4, 2, "deploy") in house.told


def test_an_autoscaled_count_is_restored_without_a_pin() -> None:
    house = House({"decode": 1}, frozenset({"decode"}))
    house.look()
    house.autoscale("decode", 3)
    assert house.targets == {"decode": 3}
    house.look()
    house.deploy("m1", {"decode": 1})
    house.look()
    assert (house.targets, house.pinned) == ({"decode": 3}, ())


def test_an_operator_goes_before_an_order_of_ours_that_has_not_arrived() -> None:
    house = House({"decode": 1}, frozenset({"decode"}))
    house.look()
    house.lever_works = False
    house.autoscale("decode", 4)
    house.targets["decode"] = 2
    house.lever_works = True
    house.look()
    assert (house.targets, house.desired, house.pinned) == ({"decode": 2}, {"decode": 2}, ("decode",))


def test_an_operator_who_undoes_our_order_before_the_next_look_is_heard() -> None:
    house = House({"decode": 1}, frozenset({"decode"}))
    house.look()
    house.autoscale("decode", 4)
    house.targets["decode"] = 1
    house.look()
    assert (house.targets, house.desired, house.pinned) == ({"decode": 1}, {"decode": 1}, ("decode",))


def test_a_lever_that_fails_is_pulled_again_ever_more_rarely_and_the_count_stays_wanted() -> None:
    house = House({"decode": 1}, frozenset({"decode"}))
    house.look()
    house.lever_works = False
    house.autoscale("decode", 3)
    for _ in range(100):
        house.look(2.0)
    assert house.desired == {"decode": 3}
    assert 5 <= len(house.pulls) <= 12
    house.lever_works = True
    house.look(60.0)
    assert house.targets == {"decode": 3}


def test_a_scaler_that_died_between_record_and_order_goes_on_in_its_next_life() -> None:
    house = House({"decode": 1}, frozenset({"decode"}))
    house.look()
    house.wishes.set_desired("decode", 3, pinned=False)
    house.keeper = Reconciler()
    house.look()
    assert (house.targets, house.pinned) == ({"decode": 3}, ())


def test_an_absent_application_says_nothing() -> None:
    house = House({"decode": 1})
    house.targets["decode"] = 3
    house.look()
    house.is_there = False
    house.look()
    house.is_there, house.status = True, "DELETING"
    house.targets = {}
    house.look()
    assert (house.desired, house.pinned) == ({"decode": 3}, ("decode",))


def test_pools_come_and_go_with_deploys_and_a_new_one_starts_as_configured() -> None:
    house = House({"decode": 1, "extra": 1})
    house.targets["extra"] = 5
    house.look()
    house.deploy("m1", {"decode": 1, "other": 2})
    house.look()
    assert (house.desired, house.targets) == ({}, {"decode": 1, "other": 2})
    house.deploy("m2", {"decode": 1, "extra": 1})
    house.look()
    assert house.targets == {"decode": 1, "extra": 1}


def test_a_pool_that_is_missing_while_the_application_deploys_is_not_forgotten() -> None:
    house = House({"decode": 1, "extra": 1})
    house.targets["extra"] = 5
    house.look()
    del house.targets["extra"]
    house.status = "DEPLOYING"
    house.look()
    assert house.desired == {"extra": 5}


class Wished:
    """The naive model of one pool: the last wish that could be known, and one that was made since."""

    def __init__(self, count: int) -> None:
        self.known = count
        self.is_held = False
        self.is_pinned = False
        self.unseen: int | None = None


class KeeperMachine(RuleBasedStateMachine):
    """Operators, the autoscaler, deploys and failures in any order. After every working look, Serve has what
    was wished last; an operator's wish that a deploy has wiped out before anybody looked is lost."""

    pools = st.sampled_from(["a", "b"])
    counts = st.integers(1, 3)

    @initialize(autoscaled=st.booleans())
    def start(self, autoscaled: bool) -> None:
        self.house = House({"a": 1, "b": 2}, frozenset({"b"}) if autoscaled else NOBODY)
        self.wished = {"a": Wished(1), "b": Wished(2)}
        self.num_deploys = 0
        # Looked at since the last change from outside.
        self.is_fresh = True
        self.memory = self.house.view()
        self.look()
        self.remember()

    @rule(pool=pools, count=counts)
    def operator(self, pool: str, count: int) -> None:
        self.house.targets[pool] = count
        self.wished[pool].unseen = count
        self.is_fresh = False

    @rule(count=counts)
    @precondition(lambda self: "b" in self.house.autoscaled and self.is_fresh)
    def autoscaler(self, count: int) -> None:
        """The scaler asks its policy only right after a look, and only for pools that are not pinned."""
        wished = self.wished["b"]
        if wished.is_pinned or self.house.targets["b"] != wished.known:
            return
        if count != wished.known:
            self.house.autoscale("b", count)
            wished.known, wished.is_held = count, True
            self.is_fresh = False

    @rule(pool=pools)
    @precondition(lambda self: self.is_fresh)
    def release(self, pool: str) -> None:
        self.house.wishes.release(pool)
        self.wished[pool].is_pinned = False

    @rule(count=st.integers(1, 3), waits=st.booleans())
    def deploy(self, count: int, waits: bool) -> None:
        """All looks of a deploy's first moments, so that what follows is told apart from its reset."""
        self.num_deploys += 1
        self.house.deploy(f"m{self.num_deploys}", {"a": count, "b": 2})
        for pool, wished in self.wished.items():
            wished.unseen = None
            held = wished.is_pinned or (pool in self.house.autoscaled and wished.is_held)
            if not held:
                wished.known, wished.is_held = self.house.configured[pool], False
        works, self.house.lever_works = self.house.lever_works, True
        if waits:
            self.house.look(70.0)
        self.house.look(70.0)
        self.house.look(SETTLE_S)
        self.house.lever_works = works
        self.is_fresh = True

    @rule()
    def look(self) -> None:
        self.house.look(70.0)
        for wished in self.wished.values():
            if wished.unseen is not None and wished.unseen != wished.known:
                wished.known, wished.is_held, wished.is_pinned = wished.unseen, True, True
            wished.unseen = None
        self.is_fresh = True

    @rule()
    def restart_scaler(self) -> None:
        self.house.keeper = Reconciler()
        self.is_fresh = False

    @rule()
    @precondition(lambda self: self.is_fresh)
    def restart_roster(self) -> None:
        """A watcher saw all: the roster has just been looked at."""
        memory = self.house.view()
        self.house.version += 1000
        self.house.wishes = DesiredState(self.house.version)
        self.house.wishes.restore(memory)

    @rule(works=st.booleans())
    def lever(self, works: bool) -> None:
        self.house.lever_works = works

    @rule()
    def controller_restarts(self) -> None:
        """Serve does not know the application for a moment, and has its targets again after that."""
        self.house.is_there = False
        self.house.look()
        self.house.is_there = True

    def remember(self) -> None:
        self.memory = self.house.view()

    @invariant()
    def the_last_wish_holds(self) -> None:
        if not self.is_fresh or any(wished.unseen is not None for wished in self.wished.values()):
            return
        wanted = {pool: wished.known for pool, wished in self.wished.items()}
        desired = self.house.configured | self.house.desired
        assert desired == wanted
        assert set(self.house.pinned) == {pool for pool, it in self.wished.items() if it.is_pinned}
        if self.house.lever_works:
            self.house.look(70.0)
            assert self.house.targets == wanted


KeeperMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
TestKeeper = KeeperMachine.TestCase
