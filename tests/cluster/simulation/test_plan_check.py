"""Plans that hold their rate pass the simulation, and at a higher rate they do not."""

from __future__ import annotations

import pytest

from cluster.planning.device_profile import device_profile
from cluster.planning.plan import ClusterPlanner, Plan
from cluster.planning.planned_model import planned_model
from cluster.planning.replica_rate import PlannedLoad
from cluster.simulation.plan_check import check_plan, checked_plans


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    model = planned_model("llama-3.1-8b", "auto", "auto")
    load = PlannedLoad(1024, 32, ttft_s=0.5, tpot_s=0.05)
    return ClusterPlanner(model, [device_profile("H100")], load, {}).for_rate(20.0)


def test_a_plan_keeps_its_objectives(plans: list[Plan]) -> None:
    check = check_plan(plans[0], 20.0)
    assert check.is_kept
    assert check.ttft_s < plans[0].load.ttft_s


@pytest.mark.slow
def test_a_plan_does_not_hold_twice_what_it_can(plans: list[Plan]) -> None:
    assert not check_plan(plans[0], 2 * plans[0].rate).is_kept


@pytest.mark.slow
def test_plans_that_miss_their_objectives_come_last(plans: list[Plan]) -> None:
    small = plans[0]
    pools = tuple(pool._replace(num_replicas=3 * pool.num_replicas) for pool in small.pools)
    large = small._replace(pools=pools)
    checked = checked_plans([small, large], 2 * small.rate)
    assert [plan for plan, _ in checked] == [large, small]
