"""Decode replicas that compute prompts within an objective: what the pools then need, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scaling_harness import (
    NOW,
    PAIR,
    RATES,
    SIZES,
    config,
    counts,
    decided,
    decoding,
    demand,
    history_of,
    pool,
    prefilling,
)

from cluster.config import ClusterConfig
from cluster.roster.messages import RosterView
from cluster.scaling.config import PoolLimits
from cluster.scaling.forecast import Moments
from cluster.scaling.forecast_replicas import ExpectedLoad, ReplicaNeed, decode_need, prefill_need
from cluster.scaling.gateway_reports import pool_views
from cluster.scaling.measured_rates import MeasuredRates, RequestSizes
from cluster.scaling.policy import ScalingPlan, decide
from cluster.scaling.roles import RoleTable
from cluster.scaling.samples import History, ReplicaSample
from cluster.scaling.shared_prompts import PromptShares, shared_needs

SETTINGS = config()
# Sequences take little KV.
FEW_BLOCKS = RATES._replace(blocks_per_sequence=1.0)
SHARING = (PAIR[0], PAIR[1]._replace(tpot_objective_s=0.05))
# As the pools are in which two of these settings take part.
FREE = PromptShares(1, 16)


def load(per_s: float, sizes: RequestSizes = SIZES, rates: MeasuredRates = FEW_BLOCKS) -> ExpectedLoad:
    return ExpectedLoad(per_s, 1.0, sizes, rates)


def needs(expected: ExpectedLoad, shares: PromptShares = FREE) -> tuple[int | None, int | None]:
    found = shared_needs(expected, SETTINGS, separate(expected), shares)
    return found["prefill"].num_replicas, found["decode"].num_replicas


def separate(expected: ExpectedLoad) -> dict[str, ReplicaNeed]:
    return {"prefill": prefill_need(expected, SETTINGS), "decode": decode_need(expected, SETTINGS)}


# ---------------------------------------------------------------------------------------------- needs


def test_decode_replicas_do_what_their_sequences_leave_time_for() -> None:
    # 10 requests/s: prompts take 2.5 replicas. 75 sequences of 0.4 ms take 30 ms of each 50: 0.6 replicas.
    # 3.1 at 75 % load are 5, of which decoding alone would need 2.
    assert needs(load(10.0)) == (1, 4)
    assert [each.num_replicas for each in separate(load(10.0)).values()] == [4, 2]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (PromptShares(2, 16), (2, 3)),
        (PromptShares(1, 3), (2, 3)),  # the rest is left to prefill
        (PromptShares(4, 16), (4, 2)),  # no fewer than decoding needs
    ],
)
def test_limits_say_where_replicas_may_be(shares: PromptShares, expected: tuple[int, int]) -> None:
    assert needs(load(10.0), shares) == expected


def test_where_prompts_take_too_long_beside_sequences_they_stay_apart() -> None:
    # 15,000 tokens take 1.9 s, and more than the objective of 2 s in the part of a step that is left.
    long = RequestSizes(Moments(15_000.0, 0.0), Moments(2000.0, 0.0), 1.0)
    assert needs(load(1.0, long)) == tuple(each.num_replicas for each in separate(load(1.0, long)).values())


@pytest.mark.parametrize(
    "expected",
    [
        load(0.0),
        load(1.0, rates=FEW_BLOCKS._replace(step=None)),
        load(1.0, rates=FEW_BLOCKS._replace(prefill_tok_s=0.0)),
    ],
)
def test_nothing_is_shared_before_it_is_measured(expected: ExpectedLoad) -> None:
    assert shared_needs(expected, SETTINGS, separate(expected), FREE) == separate(expected)


@given(
    st.floats(0.1, 60.0),
    st.integers(100, 8000),
    st.integers(1, 800),
    st.floats(0.0, 3.0),
    st.integers(1, 4),
)
def test_the_replicas_have_the_time_for_prompts_and_for_decoding(
    per_s: float, prompt: int, output: int, variation: float, least: int
) -> None:
    expected = load(per_s, RequestSizes(Moments(prompt, variation), Moments(output, 0.5), 1.0))
    alone = separate(expected)
    prefill, decode = needs(expected, PromptShares(least, 1000))
    least_decode, service, present = alone["decode"].num_replicas, expected.service, expected.num_sequences
    assert prefill is not None
    assert decode is not None
    assert least_decode is not None
    assert service is not None
    assert present is not None
    if (prefill, decode) != (alone["prefill"].num_replicas, least_decode):
        assert prefill == least
        assert decode >= least_decode
        work = per_s * service.mean + present * 0.0004 / SETTINGS.itl_slo_s
        assert (prefill + decode) * SETTINGS.target_load >= work - 1e-6


# ------------------------------------------------------------------------------------------ decisions


def test_the_decode_pool_grows_for_prompts() -> None:
    asked = demand(20, output_tokens=20)
    resting = (prefilling(), decoding(num_running=1, decode_base_s=0.012, decode_sequence_s=0.0004))
    assert counts(decided(resting, PAIR, asked))["prefill"] == (1, 4)
    plan = decided(resting, SHARING, asked)
    (move,) = plan.moves
    assert (move.pool, move.before, move.after) == ("decode", 1, 3)
    assert move.reason.startswith("forecast: 3 of 4, as decode replicas compute prompts, too: 10 requests/s")
    assert move.reason.endswith("take 2.5 replicas, and decoding 0.1; at 75% load")


@pytest.mark.parametrize("objective_s", [None, 0.06])
def test_an_engine_without_the_objective_shares_nothing(objective_s: float | None) -> None:
    asked = demand(20, output_tokens=20)
    resting = (prefilling(), decoding(num_running=1, decode_base_s=0.012, decode_sequence_s=0.0004))
    views = (PAIR[0], PAIR[1]._replace(tpot_objective_s=objective_s))
    assert decided(resting, views, asked) == decided(resting, PAIR, asked)


@pytest.mark.parametrize(("slower", "pool_name"), [(2.0, "decode"), (10.0, "prefill")])
def test_decode_replicas_on_much_slower_devices_are_left_alone(slower: float, pool_name: str) -> None:
    resting = (
        prefilling(prefill_token_s=1 / 8000),
        decoding(num_running=1, decode_base_s=0.012, decode_sequence_s=0.0004, prefill_token_s=slower / 8000),
    )
    assert {move.pool for move in decided(resting, SHARING, demand(20, output_tokens=20)).moves} == {
        pool_name
    }


@pytest.mark.parametrize(("policy", "expected"), [("tandem", 0.05), ("round_robin", None)])
def test_only_policies_that_price_prompts_share_them(policy: str, expected: float | None) -> None:
    settings = ClusterConfig.model_validate(
        {
            "model": "m",
            "router": {"policy": policy},
            "pools": [
                {"name": "p", "role": "prefill"},
                {"name": "d", "role": "decode", "engine": {"tpot_objective_s": 0.05}},
            ],
        }
    )
    roster = RosterView(version=1)
    views = pool_views(settings, roster, {"p": 1, "d": 1}, RoleTable(roster, NOW), History(60.0))
    assert [view.tpot_objective_s for view in views] == [None, expected]


def test_prompts_that_wait_call_for_decode_replicas() -> None:
    # 40,000 tokens take one replica 5 s, and 2.6 s with the decode replica, of which 10 sequences take 8 %.
    calm = decoding(num_running=10, decode_base_s=0.012, decode_sequence_s=0.0004)
    busy = replace(calm, num_backlog_tokens=20_000)
    queue = prefilling(num_running=1, num_waiting=8, num_backlog_tokens=20_000)
    plan = decided((queue, busy), SHARING)
    (move,) = plan.moves
    assert move.pool == "decode"
    assert move.reason.startswith("now: 40000 prompt tokens wait, 2.6 s for 2 replicas at 8000 tok/s each")
    assert decided((queue, calm), SHARING).moves == ()


# --------------------------------------------------------------------------------------------- growth


def grown(sizes: tuple[int, int]) -> ScalingPlan:
    """The plan for a decode pool whose sequences have grown over the last half minute."""

    def replicas(at: float) -> tuple[ReplicaSample, ...]:
        num_running = round(sizes[0] + (sizes[1] - sizes[0]) * max(0.0, (at - (NOW - 30)) / 30))
        return prefilling(), decoding(num_running=num_running, decode_base_s=0.012, decode_sequence_s=0.0004)

    return decided(replicas, PAIR)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((30, 50), None),  # by chance
        ((2, 10), None),  # not too many
        ((40, 2), None),
        ((2, 40), "7 sequences have become 35 in 20 s, and 70 are expected when a new replica is ready"),
        ((2, 60), "10 sequences have become 52 in 20 s, and 104 are expected when a new replica is ready"),
    ],
)
def test_sequences_that_become_more_call_for_replicas_before_they_are_short(
    sizes: tuple[int, int], expected: str | None
) -> None:
    plan = grown(sizes)
    if expected is None:
        assert not any("have become" in move.reason for move in plan.moves)
    else:
        (move,) = plan.moves
        assert expected in move.reason


# --------------------------------------------------------------------------------------- lasting sizes


def test_short_answers_of_a_few_seconds_are_no_reason_to_shrink() -> None:
    """Fewer replicas would do for the answers of the last 20 s, or minutes, if they are short."""

    def plan(changed_at: float) -> dict[str, tuple[int, int]]:
        replicas = tuple(
            decoding(number, num_running=4, decode_base_s=0.012, decode_sequence_s=0.0004)
            for number in range(4)
        )
        history = history_of(
            SETTINGS,
            lambda at: ((prefilling(), *replicas), demand(24, 200, 400 if at < changed_at else 40)),
        )
        views = (pool("prefill"), pool("decode", 4, limits=PoolLimits(min=1, max=16)))
        return counts(decide(history, SETTINGS, views, NOW))

    assert plan(NOW - 20.0) == {}
    assert plan(NOW - 200.0) == {"decode": (4, 1)}
