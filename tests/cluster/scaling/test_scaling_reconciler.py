"""Whose count is right: the reconciler against a naive model of who ordered what, through all restarts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scaling_harness import NOBODY, ReconcilerHarness
from slow_cases import examples

from cluster.roster.desired_state import DesiredState
from cluster.roster.messages import ReleasePool, SetDesired
from cluster.scaling.reconciler import SETTLE_S, Reconciler


def test_nothing_is_done_while_serve_has_what_the_configuration_says() -> None:
    harness = ReconcilerHarness({"decode": 1})
    harness.look()
    harness.look()
    assert (harness.desired, harness.recorded, harness.orders) == ({}, [], [])


def test_an_operators_order_is_the_desired_count_pins_the_pool_and_recalls_lent_replicas() -> None:
    harness = ReconcilerHarness({"decode": 1, "prefill": 1})
    harness.look()
    harness.targets["decode"] = 3
    harness.look()
    assert (harness.desired, harness.pinned) == ({"decode": 3}, ("decode",))
    assert harness.recorded == [("decode", 1, 3, "operator")]
    assert (harness.num_restored, harness.orders) == (1, [])
    harness.look()
    assert (harness.num_restored, len(harness.recorded)) == (1, 1)


def test_an_order_made_before_the_first_look_counts() -> None:
    harness = ReconcilerHarness({"decode": 1})
    harness.targets["decode"] = 3
    harness.look()
    assert (harness.desired, harness.pinned) == ({"decode": 3}, ("decode",))


def test_a_deploy_resets_the_count_and_it_is_restored() -> None:
    harness = ReconcilerHarness({"decode": 1})
    harness.look()
    harness.targets["decode"] = 3
    harness.look()
    harness.deploy("m1", {"decode": 1})
    harness.look()
    assert harness.targets == {"decode": 3}
    assert harness.recorded[1:] == [("decode", 1, 3, "deploy")]
    harness.look(SETTLE_S)
    harness.look(SETTLE_S)
    assert (harness.pinned, len(harness.recorded)) == (("decode",), 2)


def test_a_reset_that_comes_a_moment_after_the_mark_is_restored_too() -> None:
    harness = ReconcilerHarness({"decode": 1})
    harness.targets["decode"] = 3
    harness.look()
    harness.mark = "m1"
    harness.look()
    harness.targets["decode"] = 1
    harness.look()
    assert harness.targets == {"decode": 3}


def test_once_a_deploy_has_settled_the_configured_count_is_an_order_as_any() -> None:
    harness = ReconcilerHarness({"decode": 1})
    harness.targets["decode"] = 3
    harness.look()
    harness.deploy("m1", {"decode": 1})
    harness.look()
    harness.look(SETTLE_S)
    harness.targets["decode"] = 1
    harness.look()
    assert (harness.targets, harness.desired) == ({"decode": 1}, {"decode": 1})
    assert harness.recorded[-1] == ("decode", 3, 1, "operator")


def test_a_deploy_that_says_another_count_does_not_move_a_pinned_pool_and_moves_a_released_one() -> None:
    harness = ReconcilerHarness({"decode": 1, "prefill": 1})
    harness.targets |= {"decode": 3, "prefill": 4}
    harness.look()
    harness.state.change(ReleasePool("prefill"))
    harness.deploy("m1", {"decode": 2, "prefill": 2})
    harness.look()
    assert harness.targets == {"decode": 3, "prefill": 2}
    assert harness.desired == {"decode": 3}
    assert ("prefill", 4, 2, "deploy") in harness.recorded


def test_an_autoscaled_count_is_restored_without_a_pin() -> None:
    harness = ReconcilerHarness({"decode": 1}, frozenset({"decode"}))
    harness.look()
    harness.autoscale("decode", 3)
    assert harness.targets == {"decode": 3}
    harness.look()
    harness.deploy("m1", {"decode": 1})
    harness.look()
    assert (harness.targets, harness.pinned) == ({"decode": 3}, ())


def test_an_operator_goes_before_an_order_of_ours_that_has_not_arrived() -> None:
    harness = ReconcilerHarness({"decode": 1}, frozenset({"decode"}))
    harness.look()
    harness.serve_works = False
    harness.autoscale("decode", 4)
    harness.targets["decode"] = 2
    harness.serve_works = True
    harness.look()
    assert (harness.targets, harness.desired, harness.pinned) == ({"decode": 2}, {"decode": 2}, ("decode",))


def test_an_operator_who_undoes_our_order_before_the_next_look_is_heard() -> None:
    harness = ReconcilerHarness({"decode": 1}, frozenset({"decode"}))
    harness.look()
    harness.autoscale("decode", 4)
    harness.targets["decode"] = 1
    harness.look()
    assert (harness.targets, harness.desired, harness.pinned) == ({"decode": 1}, {"decode": 1}, ("decode",))


def test_an_order_that_fails_is_repeated_ever_more_rarely_and_the_count_stays_wanted() -> None:
    harness = ReconcilerHarness({"decode": 1}, frozenset({"decode"}))
    harness.look()
    harness.serve_works = False
    harness.autoscale("decode", 3)
    for _ in range(100):
        harness.look(2.0)
    assert harness.desired == {"decode": 3}
    assert 5 <= len(harness.orders) <= 12
    harness.serve_works = True
    harness.look(60.0)
    assert harness.targets == {"decode": 3}


def test_a_scaler_that_died_between_record_and_order_goes_on_in_its_next_life() -> None:
    harness = ReconcilerHarness({"decode": 1}, frozenset({"decode"}))
    harness.look()
    harness.state.change(SetDesired("decode", 3, pinned=False))
    harness.reconciler = Reconciler()
    harness.look()
    assert (harness.targets, harness.pinned) == ({"decode": 3}, ())


def test_an_absent_application_says_nothing() -> None:
    harness = ReconcilerHarness({"decode": 1})
    harness.targets["decode"] = 3
    harness.look()
    harness.is_there = False
    harness.look()
    harness.is_there, harness.status = True, "DELETING"
    harness.targets = {}
    harness.look()
    assert (harness.desired, harness.pinned) == ({"decode": 3}, ("decode",))


def test_pools_come_and_go_with_deploys_and_a_new_one_starts_as_configured() -> None:
    harness = ReconcilerHarness({"decode": 1, "extra": 1})
    harness.targets["extra"] = 5
    harness.look()
    harness.deploy("m1", {"decode": 1, "other": 2})
    harness.look()
    assert (harness.desired, harness.targets) == ({}, {"decode": 1, "other": 2})
    harness.deploy("m2", {"decode": 1, "extra": 1})
    harness.look()
    assert harness.targets == {"decode": 1, "extra": 1}


def test_a_pool_that_is_missing_while_the_application_deploys_is_not_forgotten() -> None:
    harness = ReconcilerHarness({"decode": 1, "extra": 1})
    harness.targets["extra"] = 5
    harness.look()
    del harness.targets["extra"]
    harness.status = "DEPLOYING"
    harness.look()
    assert harness.desired == {"extra": 5}


class Ordered:
    """The naive model of one pool: the last order that could be known, and one that was made since."""

    def __init__(self, count: int) -> None:
        self.known = count
        self.is_held = False
        self.is_pinned = False
        self.unseen: int | None = None


class ReconcilerMachine(RuleBasedStateMachine):
    """Operators, the autoscaler, deploys and failures in any order. After every working look, Serve has what
    was ordered last; an operator's order that a deploy has wiped out before anybody looked is lost."""

    pools = st.sampled_from(["a", "b"])
    counts = st.integers(1, 3)

    @initialize(autoscaled=st.booleans())
    def start(self, autoscaled: bool) -> None:
        self.harness = ReconcilerHarness({"a": 1, "b": 2}, frozenset({"b"}) if autoscaled else NOBODY)
        self.ordered = {"a": Ordered(1), "b": Ordered(2)}
        self.num_deploys = 0
        # Looked at since the last change from outside.
        self.is_fresh = True
        self.memory = self.harness.view()
        self.look()
        self.remember()

    @rule(pool=pools, count=counts)
    def operator(self, pool: str, count: int) -> None:
        """Write a count to Serve; the one that is there already is no order that anybody could see."""
        if self.harness.targets[pool] == count:
            return
        self.harness.targets[pool] = count
        self.ordered[pool].unseen = count
        self.is_fresh = False

    @rule(count=counts)
    @precondition(lambda self: "b" in self.harness.autoscaled and self.is_fresh)
    def autoscaler(self, count: int) -> None:
        """The scaler asks its policy only right after a look, and only for pools that are not pinned."""
        ordered = self.ordered["b"]
        if ordered.is_pinned or self.harness.targets["b"] != ordered.known:
            return
        if count != ordered.known:
            self.harness.autoscale("b", count)
            ordered.known, ordered.is_held = count, True
            self.is_fresh = False

    @rule(pool=pools)
    @precondition(lambda self: self.is_fresh)
    def release(self, pool: str) -> None:
        self.harness.state.change(ReleasePool(pool))
        self.ordered[pool].is_pinned = False

    @rule(count=st.integers(1, 3), waits=st.booleans())
    def deploy(self, count: int, waits: bool) -> None:
        """All looks of a deploy's first moments, so that what follows is distinguished from its reset."""
        self.num_deploys += 1
        self.harness.deploy(f"m{self.num_deploys}", {"a": count, "b": 2})
        for pool, ordered in self.ordered.items():
            ordered.unseen = None
            held = ordered.is_pinned or (pool in self.harness.autoscaled and ordered.is_held)
            if not held:
                ordered.known, ordered.is_held = self.harness.configured[pool], False
        works, self.harness.serve_works = self.harness.serve_works, True
        if waits:
            self.harness.look(70.0)
        self.harness.look(70.0)
        self.harness.look(SETTLE_S)
        self.harness.serve_works = works
        self.is_fresh = True

    @rule()
    def look(self) -> None:
        self.harness.look(70.0)
        for ordered in self.ordered.values():
            if ordered.unseen is not None and ordered.unseen != ordered.known:
                ordered.known, ordered.is_held, ordered.is_pinned = ordered.unseen, True, True
            ordered.unseen = None
        self.is_fresh = True

    @rule()
    def restart_scaler(self) -> None:
        self.harness.reconciler = Reconciler()
        self.is_fresh = False

    @rule()
    @precondition(lambda self: self.is_fresh)
    def restart_roster(self) -> None:
        """A watcher saw all: the roster has just been looked at."""
        memory = self.harness.view()
        self.harness.version += 1000
        self.harness.state = DesiredState(self.harness.version)
        self.harness.state.restore(memory)

    @rule(works=st.booleans())
    def serve(self, works: bool) -> None:
        self.harness.serve_works = works

    @rule()
    def controller_restarts(self) -> None:
        """Serve does not know the application for a moment, and has its targets again after that."""
        self.harness.is_there = False
        self.harness.look()
        self.harness.is_there = True

    def remember(self) -> None:
        self.memory = self.harness.view()

    @invariant()
    def the_last_order_holds(self) -> None:
        if not self.is_fresh or any(ordered.unseen is not None for ordered in self.ordered.values()):
            return
        wanted = {pool: ordered.known for pool, ordered in self.ordered.items()}
        desired = self.harness.configured | self.harness.desired
        assert desired == wanted
        assert set(self.harness.pinned) == {pool for pool, it in self.ordered.items() if it.is_pinned}
        if self.harness.serve_works:
            self.harness.look(70.0)
            assert self.harness.targets == wanted


ReconcilerMachine.TestCase.settings = settings(
    max_examples=examples(80), stateful_step_count=20, deadline=None
)
TestReconciler = ReconcilerMachine.TestCase
