"""What the keeper makes of the counts in the configuration: deploys bind others where those were ordered."""

from __future__ import annotations

from reconciler_harness import House


def test_another_count_in_the_configuration_is_followed_by_a_pool_that_nobody_pinned() -> None:
    house = House({"decode": 2, "prefill": 1, "auto": 3}, frozenset({"auto"}))
    house.declared = {"decode": 2, "prefill": 1, "auto": 3}
    house.look()
    house.targets["prefill"] = 4
    house.look()
    assert (house.desired, house.pinned) == ({"prefill": 4}, ("prefill",))
    house.mark, house.declared = "m1", {"decode": 3, "prefill": 2, "auto": 5}
    house.lever_works = False
    house.look()
    house.lever_works = True
    house.look(after_s=3.0)
    house.look()
    assert house.targets == {"decode": 3, "prefill": 4, "auto": 3}
    assert house.told[1:] == [("decode", 2, 3, "deploy")]
    assert house.pinned == ("prefill",)


def test_a_configuration_that_binds_its_own_new_count_orders_nothing_more() -> None:
    house = House({"decode": 2})
    house.declared = {"decode": 2}
    house.look()
    house.deploy("m1", {"decode": 4})
    house.declared = {"decode": 4}
    house.look()
    house.look(after_s=10.0)
    assert (house.desired, house.pulls, house.told) == ({}, [], [])


def test_desired_counts_that_a_deploy_binds_are_nobodys_order() -> None:
    house = House({"decode": 2})
    house.declared = {"decode": 2}
    house.look()
    house.targets["decode"] = 5
    house.look()
    house.deploy("m1", {"decode": 5})
    house.look()
    house.look(after_s=10.0)
    assert (house.desired, house.pinned, house.pulls) == ({"decode": 5}, ("decode",), [])
    assert [move[3] for move in house.told] == ["operator"]
