"""Single decisions: what grows, what does not, and what is said about it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
from scaling_harness import (
    NOW,
    PAIR,
    PROMPTS,
    RESTING,
    config,
    counts,
    decided,
    decoding,
    demand,
    history_of,
    pool,
    prefilling,
    queueing,
)

from cluster.metrics.demand import Demand
from cluster.scaling.config import PoolLimits
from cluster.scaling.policy import ScalingPlan, decide, history_span_s
from cluster.scaling.samples import History, ReplicaSample

# -------------------------------------------------------------------------------------------- when


def test_nothing_is_decided_from_nothing() -> None:
    settings = config()
    plan = decide(History(history_span_s(settings)), settings, PAIR, NOW)
    assert plan == ScalingPlan(notes=("nothing was seen yet",))


def test_nothing_is_decided_from_old_figures() -> None:
    asked = demand(40)
    assert decided(RESTING, PAIR, asked, now=NOW + 10.0).moves
    plan = decided(RESTING, PAIR, asked, now=NOW + 10.1)
    assert plan.moves == ()
    assert "10 s old" in plan.notes[0]


def test_figures_of_slow_looks_may_be_older() -> None:
    settings = config(interval_s=10.0)
    asked = demand(200)
    assert decided(RESTING, PAIR, asked, settings, now=NOW + 50.0).moves
    assert not decided(RESTING, PAIR, asked, settings, now=NOW + 50.1).moves


def test_without_autoscale_no_count_changes() -> None:
    assert decided(RESTING, PAIR, demand(40), config(autoscale=False)) == ScalingPlan()


def test_an_idle_cluster_stays_as_it_is() -> None:
    assert decided((prefilling(), decoding()), PAIR) == ScalingPlan()


# ---------------------------------------------------------------------------------------- the floor


def test_both_counts_rise_to_the_demand_at_once() -> None:
    # 20 requests/s: 40,000 prompt tokens at 8000 tok/s; 4000 output tokens, where steps of 20 ms at one
    # sequence are taken for 15 ms and 5 ms a sequence: batches of 7 within 50 ms, 140 tok/s a replica.
    views = tuple(view._replace(limits=PoolLimits(min=1, max=100)) for view in PAIR)
    plan = decided(RESTING, views, demand(40), config(most=100))
    assert counts(plan) == {"prefill": (1, 7), "decode": (1, 39)}
    prefill, decode = plan.moves
    assert prefill.reason.startswith("forecast: 20 requests/s with 2000 tokens")
    assert "140 tok/s a replica in batches of 7" in decode.reason


def test_a_pool_rises_to_its_limit_and_no_further() -> None:
    views = (pool("prefill", limits=PoolLimits(min=1, max=3)), pool("decode"))
    assert counts(decided(RESTING, views, PROMPTS)) == {"prefill": (1, 3)}
    views = (pool("prefill", 3, limits=PoolLimits(min=1, max=3)), pool("decode"))
    plan = decided((*RESTING, prefilling(1), prefilling(2)), views, PROMPTS)
    assert plan.moves == ()
    assert any("prefill stays at 3, its limit" in note for note in plan.notes)


def test_a_pinned_pool_is_left_alone_and_the_notes_say_what_it_lacks() -> None:
    views = (pool("prefill", is_pinned=True), pool("decode"))
    plan = decided(RESTING, views, demand(40))
    assert set(counts(plan)) == {"decode"}
    assert any("prefill stays at 1, where an operator pinned it" in note for note in plan.notes)


def test_a_pool_without_limits_is_left_alone() -> None:
    plan = decided(RESTING, (pool("prefill", limits=None), pool("decode")), demand(40))
    assert set(counts(plan)) == {"decode"}
    assert any("having no limits" in note for note in plan.notes)


def test_a_pool_that_grew_waits_before_it_grows_again() -> None:
    for ago_s, moves in ((14.0, False), (15.0, True)):
        views = (pool("prefill", grew_at=NOW - ago_s, changed_at=NOW - ago_s), pool("decode"))
        assert ("prefill" in counts(decided(RESTING, views, demand(40)))) is moves


def test_several_pools_of_a_role_fill_up_in_their_order() -> None:
    small = PoolLimits(min=1, max=2)
    first = pool("prefill", limits=small)
    second = pool("prefill", limits=PoolLimits(min=1, max=9))._replace(name="prefill-b")
    views = (first, second, pool("decode"))
    replicas = (*RESTING, prefilling(1, pool="prefill-b"))
    plan = decided(replicas, views, PROMPTS)
    assert counts(plan) == {"prefill": (1, 2), "prefill-b": (1, 5)}  # 7 together


def test_replicas_of_the_role_both_grow_for_both_kinds_of_work() -> None:
    both = decoding(pool="both", role="both", num_running=1, prefill_tok_s=8000.0)
    plan = decided((both,), (pool("both"),), demand(4))
    # 2 requests/s: half a replica for prompts, 400 tokens at 140 tok/s are 2.9 for steps; over 0.75.
    assert counts(plan) == {"both": (1, 5)}


def test_prefill_is_not_grown_beyond_what_decode_can_take() -> None:
    # Decode needs 39 and may have 10: a quarter of the prompts is all that it can take.
    views = (pool("prefill"), pool("decode", limits=PoolLimits(min=1, max=10)))
    plan = decided(RESTING, views, demand(40))
    assert counts(plan) == {"prefill": (1, 2), "decode": (1, 10)}
    assert any("prefill grows to 2 and not 7: decode may have 10 of the 39" in note for note in plan.notes)


def test_a_rate_that_was_not_measured_is_said() -> None:
    plan = decided((prefilling(prefill_tok_s=0.0), decoding()), PAIR, demand(4))
    assert plan.moves == ()
    assert any("no prefill rate was measured yet" in note for note in plan.notes)


# ------------------------------------------------------------------------------------- the fast loop


def test_a_queue_longer_than_the_objective_grows_prefill() -> None:
    # 8000 tok/s: 2 s are 16,000 tokens, of which the prompt itself (2000) takes an eighth.
    assert decided((queueing(13_900), decoding()), PAIR, demand(1)).moves == ()
    plan = decided((queueing(14_100), decoding()), PAIR, demand(1))
    assert counts(plan) == {"prefill": (1, 2)}
    assert plan.moves[0].reason.startswith("now: 14100 prompt tokens wait, 1.8 s for 1 replicas")


def test_a_long_queue_grows_prefill_by_what_clears_it() -> None:
    # 960,000 tokens in the 30 s that a start takes, and 1000 tok/s that arrive: 33,000 over 8000.
    plan = decided((queueing(960_000), decoding()), PAIR, demand(1))
    assert counts(plan) == {"prefill": (1, 5)}


def test_a_queue_that_grows_is_counted_as_it_will_be_when_replicas_are_ready() -> None:
    # 8 requests/s are 16,000 tok/s; 48 came in the last 6 s, of which chance may be 7. So at least 5691 tok/s
    # more come than one replica does: in the 30 s of a start, as much again every second to clear.
    settings = config(forecast_s=5000.0)  # too long for a forecast yet
    replicas = (prefilling(num_running=1, num_waiting=90, num_backlog_tokens=30_000), decoding())
    plan = decided(replicas, PAIR, demand(16), settings)
    assert counts(plan) == {"prefill": (1, math.ceil((16_000 + 1000 + 5691) / 8000))}


def test_prefill_does_not_grow_beyond_the_requests_that_wait() -> None:
    few = prefilling(num_running=1, num_waiting=1, num_backlog_tokens=480_000)
    assert counts(decided((few, decoding()), PAIR, demand(1))) == {"prefill": (1, 2)}
    alone = prefilling(num_running=1, num_waiting=0, num_backlog_tokens=480_000)
    assert decided((alone, decoding()), PAIR, demand(1)).moves == ()


def test_refusals_are_a_shortage_however_short_they_keep_the_queue() -> None:
    settings = config(forecast_s=5000.0)  # too long for a forecast yet
    replicas = (prefilling(num_running=1, num_waiting=9, num_backlog_tokens=4000), decoding())
    few, many = (dataclasses.replace(demand(2), num_refused=number) for number in (0, 6))
    assert decided(replicas, PAIR, few, settings).moves == ()
    plan = decided(replicas, PAIR, many, settings)
    # 8 requests of 2000 tokens every 2 s, of which chance may be 5 in 6 s: 4,800 tok/s above what one does.
    assert set(counts(plan)) == {"prefill"}
    assert plan.moves[0].after == 2
    assert "75% of the requests were refused" in plan.moves[0].reason


def test_no_pool_shrinks_while_requests_are_refused() -> None:
    pools = (pool("prefill", 4), pool("decode", 1))
    replicas = (*(prefilling(number) for number in range(4)), decoding())
    assert counts(decided(replicas, pools, demand(2))) == {"prefill": (4, 1)}
    refusing = dataclasses.replace(demand(2), num_refused=1)
    assert decided(replicas, pools, refusing).moves == ()


def test_late_first_tokens_make_half_a_queue_enough() -> None:
    replicas = (queueing(8000), decoding())
    late = dataclasses.replace(demand(2), num_late_first_tokens=1)
    assert decided(replicas, PAIR, demand(2)).moves == ()
    plan = decided(replicas, PAIR, late)
    assert counts(plan) == {"prefill": (1, 2)}
    assert "50% of them were late" in plan.moves[0].reason


def test_a_moment_is_no_queue() -> None:
    def replicas(at: float) -> Sequence[ReplicaSample]:
        return (queueing(100_000 if at != NOW - 2 else 0), decoding())

    assert decided(replicas, PAIR, demand(1)).moves == ()


def test_two_looks_are_too_few() -> None:
    settings, replicas = config(), (queueing(20_000), decoding())
    for seconds, moves in ((2.0, False), (4.0, True)):
        history = history_of(settings, lambda at: (replicas, demand(1)), seconds)
        assert bool(decide(history, settings, PAIR, seconds).moves) is moves


def test_what_replicas_change_that_just_came_is_seen_first() -> None:
    def replicas(at: float) -> Sequence[ReplicaSample]:
        return (
            *(queueing(20_000), queueing(20_000, replica_id="b"))[: 1 + (at > NOW - 4)],
            decoding(),
        )

    views = (pool("prefill", 2), pool("decode"))
    assert decided(replicas, views, demand(1)).moves == ()
    assert counts(decided(replicas(NOW), views, demand(1))) == {"prefill": (2, 3)}


def test_replicas_that_start_already_are_waited_for() -> None:
    views = (pool("prefill", 2), pool("decode"))
    assert decided((queueing(20_000), decoding()), views, demand(1)).moves == ()
    plan = decided((queueing(960_000), decoding()), views, demand(1))
    assert counts(plan) == {"prefill": (2, 5)}


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (
            {"num_running": 30, "num_landings": 5, "num_waiting_landings": 3},
            "3 prompts wait for free KV blocks",
        ),
        ({"num_running": 30, "num_free_blocks": 60}, "6% of the KV blocks are free"),
        (
            {"num_running": 64, "num_waiting": 4, "num_free_blocks": 600},
            "68 sequences share 64 slots",
        ),
        ({"num_running": 65, "num_free_blocks": 600}, "65 sequences share 64 slots"),
        (
            {"num_running": 30, "num_waiting": 2, "num_held_sequences": 2, "num_free_blocks": 600},
            "2 sequences wait in gateways",
        ),
        ({"num_running": 30, "decode_step_s": 0.06, "num_free_blocks": 500}, "steps take 60 ms at 30.0"),
    ],
)
def test_decode_grows_when_its_blocks_or_its_steps_run_short(load: dict[str, int], words: str) -> None:
    plan = decided((prefilling(), decoding(**load)), PAIR)
    assert set(counts(plan)) == {"decode"}
    assert words in plan.moves[0].reason


def test_decode_grows_when_sequences_are_preempted() -> None:
    def replicas(at: float) -> Sequence[ReplicaSample]:
        return prefilling(), decoding(num_running=9, num_free_blocks=300, num_preemptions=int(at >= NOW))

    plan = decided(replicas, PAIR)
    assert counts(plan) == {"decode": (1, 2)}
    assert "1 sequences were preempted" in plan.moves[0].reason


def test_decode_grows_when_its_blocks_move_to_host_memory() -> None:
    def replicas(at: float) -> Sequence[ReplicaSample]:
        return prefilling(), decoding(num_running=9, num_free_blocks=300, num_offloaded_blocks=int(at))

    assert "400 KV blocks moved to host memory" in decided(replicas, PAIR).moves[0].reason
    still = decoding(num_running=9, num_free_blocks=300, num_offloaded_blocks=400)
    assert decided((prefilling(), still), PAIR).moves == ()


def test_free_blocks_that_come_and_go_are_no_shortage() -> None:
    def replicas(at: float) -> Sequence[ReplicaSample]:
        return prefilling(), decoding(num_running=30, num_free_blocks=60 if at != NOW - 2 else 200)

    assert decided(replicas, PAIR).moves == ()


def test_decode_holds_those_that_run_wait_and_land() -> None:
    # 134 sequences in batches of 64.
    crowd = decoding(num_running=64, num_waiting=40, num_landings=30, num_free_blocks=700)
    assert counts(decided((prefilling(), crowd), PAIR)) == {"decode": (1, 3)}


def test_prompts_on_their_way_count_as_far_as_they_come_before_others_end() -> None:
    # 500 prompts of 2000 tokens wait; 4 come a second, and their 20 tokens take under a second: with 64 that
    # run they are 68 at a time, and not 564.
    full = decoding(num_running=64, num_waiting=1, num_free_blocks=700)
    crowd = prefilling(num_running=1, num_waiting=499, num_backlog_tokens=1_000_000)
    settings = config(forecast_s=5000.0)
    assert counts(decided((crowd, full), PAIR, demand(1, output_tokens=20), settings)) == {"decode": (1, 2)}


def test_of_two_shortages_the_larger_counts() -> None:
    # 940 blocks, of which a replica may use 900: 2. 30 sequences in batches of 10 (45 ms and 0.5 ms each): 3.
    short = decoding(num_running=30, num_free_blocks=60, decode_step_s=0.06)
    assert counts(decided((prefilling(), short), PAIR)) == {"decode": (1, 3)}


def test_late_gaps_make_the_planned_step_too_long() -> None:
    """With a step of 47 ms, the batch for which the forecast plans has one of 46 ms."""
    asked = demand(1, output_tokens=20)
    late = dataclasses.replace(asked, num_late_gaps=3)

    def plan_at(step_s: float, demanded: Demand) -> ScalingPlan:
        streams = decoding(num_running=9, num_free_blocks=600, decode_step_s=step_s)
        return decided((prefilling(), streams), PAIR, demanded)

    assert plan_at(0.047, asked).moves == ()
    assert plan_at(0.045, late).moves == ()  # as planned: another replica would be no cure
    plan = plan_at(0.047, late)
    assert counts(plan) == {"decode": (1, 2)}
    assert "16% of the gaps were longer" in plan.moves[0].reason


def test_long_steps_of_single_sequences_are_not_cured_by_numbers() -> None:
    alone = decoding(num_running=1, decode_step_s=0.2)
    assert decided((prefilling(), alone), PAIR).moves == ()


def test_decode_grows_and_prefill_does_not_while_prompts_wait_for_decode() -> None:
    """However long the prefill queue is: its replicas would wait with it."""
    full = decoding(num_running=30, num_landings=4, num_waiting_landings=4, num_free_blocks=20)
    queue = queueing(200_000)
    plan = decided((queue, full), PAIR, demand(1))
    assert set(counts(plan)) == {"decode"}
    assert any("prefill does not grow for its queue" in note for note in plan.notes)
    # The same queue with free blocks at the decode side is prefill's own.
    assert set(counts(decided((queue, decoding()), PAIR, demand(1)))) == {"prefill"}


def test_decode_grows_for_the_prompts_that_are_on_their_way() -> None:
    # 40 sequences hold 980 blocks, 24.5 each, and 900 of a replica's 1000 may be in use. With the 9 prompts
    # in the prefill side 1200 are needed, with 90 of them 3185.
    full = decoding(num_running=40, num_free_blocks=20)
    assert counts(decided((queueing(20_000), full), PAIR)) == {"decode": (1, 2)}
    many = prefilling(num_running=1, num_waiting=89, num_backlog_tokens=20_000)
    assert counts(decided((many, full), PAIR)) == {"decode": (1, 4)}
