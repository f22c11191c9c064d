"""Single decisions: what shrinks, and what had better not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from scaling_harness import NOW, config, counts, decided, decoding, demand, history_of, pool, prefilling

from cluster.metrics.demand import Demand
from cluster.scaling.config import PoolLimits
from cluster.scaling.policy import PoolMove, decide

# ------------------------------------------------------------------------------------------ shrinking

THREE = (prefilling(), decoding(0), decoding(1), decoding(2))
WIDE = (pool("prefill"), pool("decode", 3))


def test_what_is_not_needed_goes() -> None:
    plan = decided(THREE, WIDE)
    assert counts(plan) == {"decode": (3, 1)}
    assert "the last 120 s" in plan.moves[0].reason


def test_much_more_than_needed_goes_as_far_as_it_can_be_spared() -> None:
    replicas = (prefilling(), *(decoding(number) for number in range(14)))
    assert counts(decided(replicas, (pool("prefill"), pool("decode", 14)))) == {"decode": (14, 1)}
    # With half of the blocks in use, two can.
    half = (prefilling(), *(decoding(number, num_running=1, num_free_blocks=430) for number in range(14)))
    assert counts(decided(half, (pool("prefill"), pool("decode", 14)))) == {"decode": (14, 12)}


def test_a_pool_that_changed_waits_before_it_shrinks() -> None:
    for ago_s, moves in ((119.0, False), (120.0, True)):
        views = (pool("prefill"), pool("decode", 3, changed_at=NOW - ago_s))
        assert bool(decided(THREE, views).moves) is moves


def test_nothing_shrinks_before_it_was_watched_for_the_cool_down() -> None:
    settings = config()
    for seconds, moves in ((118.0, False), (120.0, True)):
        history = history_of(settings, lambda at: (THREE, Demand()), seconds)
        assert bool(decide(history, settings, WIDE, seconds).moves) is moves


def test_no_pool_shrinks_below_its_limit_or_against_an_operator() -> None:
    for view in (
        pool("decode", 3, limits=PoolLimits(min=3, max=5)),
        pool("decode", 3, is_pinned=True),
        pool("decode", 3, limits=None),
    ):
        assert decided(THREE, (pool("prefill"), view)).moves == ()


def test_nothing_shrinks_while_replicas_start_or_say_nothing() -> None:
    assert decided(THREE[:-1], WIDE).moves == ()
    assert decided((*THREE[:-1], decoding(2, age_s=60.0)), WIDE).moves == ()


def test_a_pool_shrinks_only_where_the_smaller_one_serves_more_than_the_demand() -> None:
    # 8000 tok/s at 75 % serve 3 requests/s of 2000 tokens: two replicas are needed above, and the second goes
    # only below 3 / 1.2.
    replicas = (prefilling(0), prefilling(1), decoding())
    views = (pool("prefill", 2), pool("decode"))
    settings = config(ttft_slo_s=20.0)
    assert decided(replicas, views, demand(6, output_tokens=1), settings).moves == ()  # 3/s
    assert counts(decided(replicas, views, demand(4, output_tokens=1), settings)) == {"prefill": (2, 1)}
    assert (
        decided(
            replicas, views, dataclasses.replace(demand(5, output_tokens=1), num_arrived=6), settings
        ).moves
        == ()
    )


def test_a_pool_that_held_too_much_for_one_less_does_not_shrink() -> None:
    half = {"num_running": 20, "num_free_blocks": 500}
    assert (
        decided((prefilling(), decoding(0, **half), decoding(1, **half), decoding(2, **half)), WIDE).moves
        == ()
    )
    little = {"num_running": 2, "num_free_blocks": 900}
    replicas = (prefilling(), decoding(0, **little), decoding(1, **little), decoding(2, **little))
    assert counts(decided(replicas, WIDE)) == {"decode": (3, 1)}


def test_what_was_late_at_times_does_not_shrink() -> None:
    """7 % of the first tokens, or of the gaps: within the objective, but with nothing to spare."""
    light = demand(1, prompt_tokens=100, output_tokens=10)
    replicas = (prefilling(0), prefilling(1), decoding(0, num_running=1), decoding(1))
    views = (pool("prefill", 2), pool("decode", 2))

    def every(num_samples: int, late: Demand) -> Callable[[float], Demand]:
        return lambda at: late if at % (2 * num_samples) == 0 else light

    def shrinking(asked: Callable[[float], Demand]) -> dict[str, tuple[int, int]]:
        settings = config()
        history = history_of(settings, lambda at: (replicas, asked(at)))
        return counts(decide(history, settings, views, NOW))

    assert shrinking(lambda at: light) == {"prefill": (2, 1), "decode": (2, 1)}
    late_first = every(14, dataclasses.replace(light, num_late_first_tokens=1))
    assert shrinking(late_first) == {"decode": (2, 1)}
    late_gaps = every(14, dataclasses.replace(light, num_late_gaps=9))
    assert shrinking(late_gaps) == {"prefill": (2, 1)}


@pytest.mark.parametrize(("each", "after"), [(32, 2), (33, 3)])
def test_a_pool_shrinks_only_where_batches_have_space_for_all_that_continue(each: int, after: int) -> None:
    # Two replicas take 64 each, three quarters of it 96 together.
    going_on = {"num_running": each, "num_free_blocks": 900}
    replicas = (prefilling(), *(decoding(number, **going_on) for number in range(3)))
    plan = decided(replicas, WIDE)
    assert counts(plan).get("decode", (3, 3)) == (3, after)


def test_a_released_pool_comes_back_into_its_limits() -> None:
    narrow = PoolLimits(min=2, max=4)
    resting = (prefilling(), *(decoding(number) for number in range(6)))
    plan = decided(resting, (pool("prefill"), pool("decode", 6, limits=narrow)))
    assert counts(plan) == {"decode": (6, 2)}
    plan = decided((prefilling(), decoding()), (pool("prefill"), pool("decode", 1, limits=narrow)))
    assert plan.moves == (PoolMove("decode", 1, 2, "below its limit of 2"),)
