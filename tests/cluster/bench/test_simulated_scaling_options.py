"""What `--autoscale` of `tandem simulate` accepts."""

from __future__ import annotations

import pytest

from cluster.bench.simulated_scaling_options import planned_scaling
from cluster.errors import ConfigError
from cluster.scaling.config import PoolLimits


def test_pools_with_their_limits() -> None:
    plan = planned_scaling("prefill=1:8, decode=0:3", 45.0, 2.0, 0.05, may_change_roles=True)
    assert plan is not None
    assert plan.config.pools == {"prefill": PoolLimits(min=1, max=8), "decode": PoolLimits(min=0, max=3)}
    assert (plan.config.ttft_slo_s, plan.config.itl_slo_s, plan.times.start_s) == (2.0, 0.05, 45.0)
    assert plan.config.change_roles


def test_nothing_is_scaled_without_pools() -> None:
    assert planned_scaling("", 60.0, 2.0, 0.05, may_change_roles=False) is None


def test_a_replica_takes_a_minute_to_start_if_nothing_is_said() -> None:
    plan = planned_scaling("both=1:2", None, 2.0, 0.05, may_change_roles=False)
    assert plan is not None
    assert plan.times.start_s == 60.0


def test_a_pool_is_named_once() -> None:
    with pytest.raises(ConfigError, match="names a pool more than once"):
        planned_scaling("both=1:2,both=1:3", 60.0, 2.0, 0.05, may_change_roles=False)


@pytest.mark.parametrize("text", ["prefill", "prefill=1", "prefill=3:2", "decode=0:0", "middle=1:2"])
def test_other_texts_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--autoscale {text}: expected ROLE=MIN:MAX"):
        planned_scaling(text, 60.0, 2.0, 0.05, may_change_roles=False)
