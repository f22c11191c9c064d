"""What the reconciler makes of the configured counts: deploys bind others where those were ordered."""

from __future__ import annotations

from scaling_harness import ReconcilerHarness


def test_another_count_in_the_configuration_is_followed_by_a_pool_that_nobody_pinned() -> None:
    harness = ReconcilerHarness({"decode": 2, "prefill": 1, "auto": 3}, frozenset({"auto"}))
    harness.declared = {"decode": 2, "prefill": 1, "auto": 3}
    harness.look()
    harness.targets["prefill"] = 4
    harness.look()
    assert (harness.desired, harness.pinned) == ({"prefill": 4}, ("prefill",))
    harness.mark, harness.declared = "m1", {"decode": 3, "prefill": 2, "auto": 5}
    harness.serve_works = False
    harness.look()
    harness.serve_works = True
    harness.look(after_s=3.0)
    harness.look()
    assert harness.targets == {"decode": 3, "prefill": 4, "auto": 3}
    assert harness.recorded[1:] == [("decode", 2, 3, "deploy")]
    assert harness.pinned == ("prefill",)


def test_a_configuration_that_binds_its_own_new_count_orders_nothing_more() -> None:
    harness = ReconcilerHarness({"decode": 2})
    harness.declared = {"decode": 2}
    harness.look()
    harness.deploy("m1", {"decode": 4})
    harness.declared = {"decode": 4}
    harness.look()
    harness.look(after_s=10.0)
    assert (harness.desired, harness.orders, harness.recorded) == ({}, [], [])


def test_desired_counts_that_a_deploy_binds_are_nobodys_order() -> None:
    harness = ReconcilerHarness({"decode": 2})
    harness.declared = {"decode": 2}
    harness.look()
    harness.targets["decode"] = 5
    harness.look()
    harness.deploy("m1", {"decode": 5})
    harness.look()
    harness.look(after_s=10.0)
    assert (harness.desired, harness.pinned, harness.orders) == ({"decode": 5}, ("decode",), [])
    assert [move[3] for move in harness.recorded] == ["operator"]
