"""Single decisions: pools that may have no replica."""

from __future__ import annotations

from collections.abc import Sequence

from scaling_harness import (
    NOTHING,
    NOW,
    RESTING,
    config,
    counts,
    decided,
    decoding,
    demand,
    history_of,
    pool,
    prefilling,
)

from cluster.metrics.demand import Demand
from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.policy import decide, history_span_s
from cluster.scaling.samples import PoolView, ReplicaSample

TO_ZERO = PoolLimits(min=0, max=4)
SETTINGS = config(pools={"prefill": {"min": 0, "max": 4}, "decode": {"min": 0, "max": 4}}, zero_after_s=300.0)
PAIR = (pool("prefill", limits=TO_ZERO), pool("decode", limits=TO_ZERO))
NONE = (pool("prefill", 0, limits=TO_ZERO), pool("decode", 0, limits=TO_ZERO))
IDLE = (prefilling(), decoding())


def plan_after(
    replicas: Sequence[ReplicaSample],
    views: Sequence[PoolView],
    asked_at: float,
    settings: ScalingConfig = SETTINGS,
) -> dict[str, tuple[int, int]]:
    """Return the moves at `NOW`, where the last request came at that time."""

    def sample_of(at: float) -> tuple[Sequence[ReplicaSample], Demand]:
        return replicas, demand(1) if at == asked_at else NOTHING

    desired = {view.name: view.desired for view in views}
    return counts(decide(history_of(settings, sample_of, desired=desired), settings, views, NOW))


def test_unused_pools_go_to_zero_together() -> None:
    assert plan_after(IDLE, PAIR, NOW - 302) == {"prefill": (1, 0), "decode": (1, 0)}


def test_a_request_in_that_time_keeps_them() -> None:
    assert plan_after(IDLE, PAIR, NOW - 298) == {}


def test_what_is_left_to_do_keeps_them() -> None:
    assert plan_after(RESTING, PAIR, NOW - 400) == {}


def test_a_pool_with_a_least_count_stays() -> None:
    views = (PAIR[0], pool("decode"))
    assert plan_after(IDLE, views, NOW - 400) == {"prefill": (1, 0)}
    pinned = (PAIR[0]._replace(is_pinned=True), pool("decode"))
    assert plan_after(IDLE, pinned, NOW - 400) == {}


def test_nothing_goes_before_it_was_watched_long_enough() -> None:
    settings = SETTINGS.model_copy(update={"zero_after_s": 500.0})
    assert plan_after(IDLE, PAIR, -1.0, settings) == {}
    assert history_span_s(settings) > 500.0


def test_a_request_starts_one_of_each() -> None:
    assert plan_after((), NONE, NOW) == {"prefill": (0, 1), "decode": (0, 1)}


def test_nothing_starts_without_a_request() -> None:
    assert plan_after((), NONE, -1.0) == {}


def test_a_pool_without_limits_to_zero_is_never_empty() -> None:
    assert counts(decided(IDLE, (pool("prefill"), pool("decode")))) == {}
