"""Single decisions: what moves, what does not, and what is said about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scaling_house import config, decoding, demand, history_of, pool, prefilling

from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.history import Demand, History, PoolView, ReplicaSample
from cluster.scaling.policy import Lend, Plan, PoolMove, Recall, decide, history_span_s

NOW = 400.0
NOTHING = Demand()
PROMPTS = demand(40, output_tokens=1)
"""20 requests/s of 2000 tokens, with one token of output: nothing to decode."""
BUSY = {"num_running": 40, "num_free_blocks": 600}


def decided(
    replicas: Sequence[ReplicaSample] | Callable[[float], Sequence[ReplicaSample]],
    pools: Sequence[PoolView],
    asked: Demand = NOTHING,
    settings: ScalingConfig | None = None,
    now: float = NOW,
) -> Plan:
    """The plan after 400 s in which the replicas looked like this and so much was asked every 2 s."""
    settings = settings or config()
    desired = {view.name: view.desired for view in pools}
    history = history_of(
        settings, lambda at: (replicas(at) if callable(replicas) else replicas, asked), desired=desired
    )
    plan = decide(history, settings, pools, now)
    assert decide(history, settings, pools, now) == plan  # the same again: it keeps nothing
    return plan


def counts(plan: Plan) -> dict[str, tuple[int, int]]:
    return {move.pool: (move.before, move.after) for move in plan.moves}


PAIR = (pool("prefill"), pool("decode"))
RESTING = (prefilling(), decoding(num_running=1))


# -------------------------------------------------------------------------------------------- when


def test_nothing_is_decided_from_nothing() -> None:
    settings = config()
    plan = decide(History(history_span_s(settings)), settings, PAIR, NOW)
    assert plan == Plan(notes=("nothing was seen yet",))


def test_nothing_is_decided_from_old_figures() -> None:
    asked = demand(40)
    assert decided(RESTING, PAIR, asked, now=NOW + 10.0).moves
    plan = decided(RESTING, PAIR, asked, now=NOW + 10.1)
    assert plan.moves == ()
    assert "10 s old" in plan.notes[0]


def test_without_autoscale_no_count_changes() -> None:
    assert decided(RESTING, PAIR, demand(40), config(autoscale=False)) == Plan()


def test_an_idle_cluster_stays_as_it_is() -> None:
    assert decided((prefilling(), decoding()), PAIR) == Plan()


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


def queueing(backlog: int, **load: Any) -> ReplicaSample:
    return prefilling(num_running=1, num_waiting=8, num_backlog_tokens=backlog, **load)


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


def test_late_first_tokens_make_half_a_queue_enough() -> None:
    replicas = (queueing(8000), decoding())
    late = demand(2)._replace(num_late_first_tokens=1)
    assert decided(replicas, PAIR, demand(2)).moves == ()
    plan = decided(replicas, PAIR, late)
    assert counts(plan) == {"prefill": (1, 2)}
    assert "50% of them were late" in plan.moves[0].reason


def test_a_moment_is_no_queue() -> None:
    def replicas(at: float) -> Sequence[ReplicaSample]:
        return (queueing(100_000 if at != NOW - 2 else 0), decoding())

    assert decided(replicas, PAIR, demand(1)).moves == ()


def test_replicas_that_start_already_are_waited_for() -> None:
    views = (pool("prefill", 2), pool("decode"))
    assert decided((queueing(20_000), decoding()), views, demand(1)).moves == ()
    plan = decided((queueing(960_000), decoding()), views, demand(1))
    assert counts(plan) == {"prefill": (2, 5)}


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({"num_running": 30, "num_landings": 5, "num_waiting_landings": 3}, "3 prompts wait for KV room"),
        ({"num_running": 30, "num_free_blocks": 60}, "6% of the KV blocks are free"),
        (
            {"num_running": 64, "num_waiting": 4, "num_free_blocks": 600},
            "68 sequences share 64 slots",
        ),
        ({"num_running": 65, "num_free_blocks": 600}, "65 sequences share 64 slots"),
        ({"num_running": 30, "decode_step_s": 0.06, "num_free_blocks": 500}, "steps take 60 ms at 30.0"),
    ],
)
def test_decode_grows_when_its_room_or_its_steps_run_short(load: dict[str, int], words: str) -> None:
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


def test_room_that_comes_and_goes_is_not_short() -> None:
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


def test_late_gaps_make_half_a_step_enough() -> None:
    replicas = (prefilling(), decoding(num_running=9, num_free_blocks=600, decode_step_s=0.03))
    asked = demand(1, output_tokens=20)
    assert decided(replicas, PAIR, asked).moves == ()
    plan = decided(replicas, PAIR, asked._replace(num_late_gaps=3))
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
    # The same queue with room at the decode side is prefill's own.
    assert set(counts(decided((queue, decoding()), PAIR, demand(1)))) == {"prefill"}


def test_decode_makes_room_for_the_prompts_that_are_on_their_way() -> None:
    # 40 sequences hold 980 blocks, 24.5 each, and 900 of a replica's 1000 may be in use. With the 9 prompts
    # in the prefill side 1200 are needed, with 90 of them 3185.
    full = decoding(num_running=40, num_free_blocks=20)
    assert counts(decided((queueing(20_000), full), PAIR)) == {"decode": (1, 2)}
    many = prefilling(num_running=1, num_waiting=89, num_backlog_tokens=20_000)
    assert counts(decided((many, full), PAIR)) == {"decode": (1, 4)}


# ------------------------------------------------------------------------------------------ shrinking

THREE = (prefilling(), decoding(0), decoding(1), decoding(2))
WIDE = (pool("prefill"), pool("decode", 3))


def test_what_is_not_needed_goes_one_by_one() -> None:
    plan = decided(THREE, WIDE)
    assert counts(plan) == {"decode": (3, 2)}
    assert "the last 120 s" in plan.moves[0].reason


def test_much_more_than_needed_goes_by_quarters() -> None:
    replicas = (prefilling(), *(decoding(number) for number in range(14)))
    assert counts(decided(replicas, (pool("prefill"), pool("decode", 14)))) == {"decode": (14, 11)}
    # As far as it can be spared: with half of the blocks in use, one can.
    half = (prefilling(), *(decoding(number, num_running=1, num_free_blocks=430) for number in range(14)))
    assert counts(decided(half, (pool("prefill"), pool("decode", 14)))) == {"decode": (14, 13)}


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
    assert decided(replicas, views, demand(5, output_tokens=1)._replace(num_arrived=6), settings).moves == ()


def test_a_pool_that_held_too_much_for_one_less_does_not_shrink() -> None:
    half = {"num_running": 20, "num_free_blocks": 500}
    assert (
        decided((prefilling(), decoding(0, **half), decoding(1, **half), decoding(2, **half)), WIDE).moves
        == ()
    )
    little = {"num_running": 2, "num_free_blocks": 900}
    replicas = (prefilling(), decoding(0, **little), decoding(1, **little), decoding(2, **little))
    assert counts(decided(replicas, WIDE)) == {"decode": (3, 2)}


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
    late_first = every(14, light._replace(num_late_first_tokens=1))
    assert shrinking(late_first) == {"decode": (2, 1)}
    late_gaps = every(14, light._replace(num_late_gaps=9))
    assert shrinking(late_gaps) == {"prefill": (2, 1)}


def test_a_released_pool_comes_back_into_its_limits() -> None:
    narrow = PoolLimits(min=2, max=4)
    resting = (prefilling(), *(decoding(number) for number in range(6)))
    plan = decided(resting, (pool("prefill"), pool("decode", 6, limits=narrow)))
    assert counts(plan) == {"decode": (6, 5)}
    plan = decided((prefilling(), decoding()), (pool("prefill"), pool("decode", 1, limits=narrow)))
    assert plan.moves == (PoolMove("decode", 1, 2, "below its limit of 2"),)


# -------------------------------------------------------------------------------------------- lending

LENDING = config(lend_roles=True, autoscale=False)
FULL = {"num_running": 30, "num_landings": 4, "num_waiting_landings": 4, "num_free_blocks": 20}
IDLE_PAIR = (prefilling(0), prefilling(1), decoding(0, **FULL))
TWO_ONE = (pool("prefill", 2), pool("decode"))


def test_an_idle_prefill_replica_decodes_where_decode_is_short() -> None:
    plan = decided(IDLE_PAIR, TWO_ONE, settings=LENDING)
    (lend,) = plan.lends
    assert isinstance(lend, Lend)
    assert (lend.replica_id, lend.pool, lend.role) == ("prefill-0", "prefill", "decode")
    assert "idle for 20 s, while decode is short: 4 prompts wait for KV room" in lend.reason
    assert plan.moves == ()


def test_an_idle_decode_replica_computes_prompts_where_prefill_is_short() -> None:
    replicas = (queueing(100_000), decoding(0), decoding(1))
    (lend,) = decided(replicas, (pool("prefill"), pool("decode", 2)), settings=LENDING).lends
    assert isinstance(lend, Lend)
    assert (lend.replica_id, lend.role) == ("decode-0", "prefill")


def test_the_last_replica_of_a_role_is_not_lent() -> None:
    assert decided((prefilling(0), decoding(0, **FULL)), PAIR, settings=LENDING).lends == ()


def test_nobody_is_lent_without_leave() -> None:
    assert decided(IDLE_PAIR, TWO_ONE, settings=config(autoscale=False)).lends == ()
    pinned = (pool("prefill", 2, is_pinned=True), pool("decode"))
    assert decided(IDLE_PAIR, pinned, settings=LENDING).lends == ()


def test_who_worked_lately_is_not_lent() -> None:
    def replicas(at: float) -> Sequence[ReplicaSample]:
        busy = {"num_running": int(at == NOW - 18)}
        return prefilling(0, **busy), prefilling(1, **busy), decoding(0, **FULL)

    assert decided(replicas, TWO_ONE, settings=LENDING).lends == ()


def test_a_moment_of_shortage_lends_nobody() -> None:
    def replicas(at: float) -> Sequence[ReplicaSample]:
        return prefilling(0), prefilling(1), decoding(0, **(FULL if at >= NOW - 16 else {}))

    assert decided(replicas, TWO_ONE, settings=LENDING).lends == ()


def test_whom_the_demand_at_home_needs_is_not_lent() -> None:
    # 5 requests/s of 2000 tokens keep two busy over 60 %, even if they were idle at each look.
    assert decided(IDLE_PAIR, TWO_ONE, demand(10, output_tokens=1), LENDING).lends == ()


def test_one_is_lent_at_a_time() -> None:
    replicas = (prefilling(0, role="decode", **FULL), prefilling(1), prefilling(2), decoding(0, **FULL))
    for ago_s, lends in ((19.0, 0), (20.0, 1)):
        views = (pool("prefill", 3, lent=(("prefill-0", NOW - ago_s),)), pool("decode"))
        plan = decided(replicas, views, settings=LENDING)
        assert [type(each) for each in plan.lends] == [Lend] * lends


LENT = (pool("prefill", 2, lent=(("prefill-0", 100.0),)), pool("decode"))


def recalled(replicas: Sequence[ReplicaSample], views: Sequence[PoolView] = LENT, **settings: Any) -> str:
    """Why prefill-0 is called back; "": it is not."""
    plan = decided(replicas, views, settings=LENDING.model_copy(update=settings))
    assert all(isinstance(each, Recall) for each in plan.lends)
    assert {each.replica_id for each in plan.lends} <= {"prefill-0"}
    return plan.lends[0].reason if plan.lends else ""


BORROWED = prefilling(0, role="decode", **BUSY)


def test_who_is_lent_stays_while_it_is_needed_there() -> None:
    assert recalled((BORROWED, prefilling(1), decoding(0, **BUSY))) == ""


def test_a_queue_at_home_calls_it_back() -> None:
    assert recalled((BORROWED, queueing(100_000), decoding(0, **BUSY))).startswith("prefill needs it: 100000")


def test_who_is_idle_there_goes_home() -> None:
    idle = prefilling(0, role="decode")
    assert recalled((idle, prefilling(1), decoding(0, **BUSY))) == "idle for 20 s as decode"
    for ago_s, reason in ((19.0, ""), (20.0, "idle for 20 s as decode")):
        views = (pool("prefill", 2, lent=(("prefill-0", NOW - ago_s),)), pool("decode"))
        assert recalled((idle, prefilling(1), decoding(0, **BUSY)), views) == reason


def test_who_can_be_spared_there_goes_home() -> None:
    light = {"num_running": 1, "num_free_blocks": 950}
    replicas = (prefilling(0, role="decode", **light), prefilling(1), decoding(0, **light))
    assert "room for one replica less" in recalled(replicas)


def test_operators_and_settings_call_it_back() -> None:
    there = (BORROWED, prefilling(1), decoding(0, **BUSY))
    assert recalled(there, lend_roles=False) == "lending is switched off"
    pinned = (LENT[0]._replace(is_pinned=True), LENT[1])
    assert recalled(there, pinned) == "an operator chose the pool's count"


def test_a_lent_replica_counts_where_it_works() -> None:
    """Decode has the borrowed one, so it needs no other; prefill grows only beyond those it can call back."""
    settings = config(lend_roles=True)
    replicas = (BORROWED, queueing(100_000), decoding(0, **BUSY))
    plan = decided(replicas, LENT, demand(1), settings)
    assert [each.replica_id for each in plan.lends] == ["prefill-0"]
    assert plan.moves == ()


def test_what_decode_has_borrowed_it_need_not_grow_by() -> None:
    # 3 * 134 sequences on two replicas, one of them borrowed: batches of 64 need 5, and 4 of them at home.
    crowd = {"num_running": 64, "num_waiting": 40, "num_landings": 30, "num_free_blocks": 700}
    replicas = (prefilling(0, role="decode", **crowd), prefilling(1), decoding(0, **crowd))
    plan = decided(replicas, LENT, settings=config(lend_roles=True))
    assert counts(plan) == {"decode": (1, 4)}
