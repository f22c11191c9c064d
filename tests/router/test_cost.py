"""Every term of the cost, by hand; and the choice against trying every pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvtransfer.messages import ReplicaIdentity
from router.current_load import CurrentLoad
from router.messages import Candidate, Decision, ReplicaLoad, TimeLimit
from router.policies.cheapest_choice import OVERLAP, choose, recompute
from router.policies.cost_policy import (
    NEVER_FITS_S,
    NO_SPACE_S,
    STALE_S,
    WORK_PART,
    decode_candidate,
    disturbance_s,
    local_candidate,
    prefill_candidate,
    space_penalty_s,
)
from router.policies.replica_cost import ReplicaCost, RouteQuery, replica_cost
from router.rates import (
    DEFAULT_BATCH_TOKENS,
    DEFAULT_LOAD_RATIO,
    DEFAULT_SEQUENCE_PART,
    DEFAULT_TRANSFER_RATIO,
    LEAST_PROMPT_SHARE,
    rates_of,
)
from workers.scheduler import chunk_sizes

# Of a token, at the speed of these replicas.
TOKEN_S = 1e-4

QUERY = RouteQuery(1000, 200, 1, 64, 64, True)


def state(
    role: str = "decode",
    backlog: int = 0,
    sequences: int = 0,
    free: int = 100,
    prefill_tok_s: float = 10_000.0,
    decode_step_s: float = 0.02,
    transfer_tok_s: float = 50_000.0,
    load_tok_s: dict[str, float] | None = None,
    replica_id: str = "r",
    total: int = 100,
    max_local_tokens: int = 0,
) -> CurrentLoad:
    report = ReplicaLoad(
        identity=ReplicaIdentity(replica_id, 1),
        received_at=0.0,
        num_running=sequences,
        num_waiting=0,
        num_landings=0,
        num_backlog_tokens=backlog,
        num_free_blocks=free,
        num_total_blocks=total,
        prefill_tok_s=prefill_tok_s,
        decode_step_s=decode_step_s,
        transfer_tok_s=transfer_tok_s,
        load_tok_s=load_tok_s or {},
        max_local_tokens=max_local_tokens,
    )
    return CurrentLoad(role, report, backlog, sequences, free, rates_of(report, sequences))


def held(of: CurrentLoad, matched_tokens: int, is_stale: bool = False) -> ReplicaCost:
    """The cost of a replica whose device holds that many tokens, and whose store holds none."""
    rest = QUERY.num_tokens - matched_tokens
    prefill_s = of.rates.prefill_s(rest, matched_tokens)
    return ReplicaCost(of, is_stale, matched_tokens, rest, prefill_s, prefill_s, of.queue(1.0), 0.0)


def test_prefill_terms() -> None:
    candidate = prefill_candidate(QUERY, held(state("prefill", backlog=300), 640))
    assert (candidate.matched_tokens, candidate.uncached_tokens) == (640, 360)
    assert candidate.pressure_s == pytest.approx(WORK_PART * 360 * TOKEN_S)
    assert candidate.cost_s == pytest.approx((360 + 300 + WORK_PART * 360) * TOKEN_S)
    assert candidate.transfer_s == 1000 / 50_000
    stale = prefill_candidate(QUERY, held(state("prefill", backlog=300), 640, True))
    assert stale.cost_s == pytest.approx(candidate.cost_s + STALE_S)
    assert stale.note == "stale load"


def test_windows_and_states_are_sent_once_whatever_the_other_has() -> None:
    plain = state("prefill")
    report = replace(plain.report, window_tokens=128, window_token_ratio=3.0, state_tokens=2000.0)
    grouped = plain._replace(report=report, rates=rates_of(report, 0))
    costs = [prefill_candidate(QUERY, held(it, 640)) for it in (plain, grouped)]
    assert costs[0].once_s == 0.0
    assert costs[1].once_s == pytest.approx((2000 + 3 * 128) / 50_000)
    assert costs[1].cost_s == pytest.approx(costs[0].cost_s + costs[1].once_s)
    assert costs[1].transfer_s == costs[0].transfer_s
    short = QUERY._replace(num_tokens=100)
    assert prefill_candidate(short, held(grouped, 0)).once_s == pytest.approx((2000 + 300) / 50_000)


def test_a_both_replica_prefills_at_the_expense_of_its_streams() -> None:
    candidate = prefill_candidate(QUERY, held(state("both", sequences=3), 0))
    assert candidate.pressure_s == pytest.approx((WORK_PART * 1000 + 3 * 1000) * TOKEN_S)
    assert candidate.cost_s == pytest.approx(candidate.pressure_s + 1000 * TOKEN_S)


@pytest.mark.parametrize(
    ("role", "sequences", "uncached", "tokens"),
    [
        ("prefill", 5, 1000, 0.0),
        ("both", 0, 1000, 0.0),
        ("both", 5, 1000, 5000.0),  # 100 ms, five steps: every stream waits for all of it
        ("both", 5, 100, 250.0),  # 10 ms, half a step: half of it is noticed
        ("decode", 0, 1000, 1000.0),  # the next stream counts
        ("decode", 5, 100, 300.0),
    ],
)
def test_disturbance(role: str, sequences: int, uncached: int, tokens: float) -> None:
    replica = state(role, sequences=sequences)
    assert disturbance_s(replica, uncached * TOKEN_S) == pytest.approx(tokens * TOKEN_S)


def tpot_bound(sequences: int, objective_s: float) -> CurrentLoad:
    """A decode replica whose chunks are sized by an objective. A step takes 10 ms, and 1 ms a sequence."""
    report = replace(
        state(sequences=sequences).report,
        prefill_token_s=TOKEN_S,
        decode_base_s=0.01,
        decode_sequence_s=0.001,
        tpot_objective_s=objective_s,
    )
    return CurrentLoad("decode", report, 0, sequences, 100, rates_of(report, sequences))


@pytest.mark.parametrize(
    ("sequences", "stretch", "part"),
    [
        (0, 1.0, 0.1),
        (5, 40 / 35, 0.1),  # 35 of 40 ms are the chunk's
        (20, 2.0, 0.1),
        (50, 80 / 30, 0.55),  # 60 ms without a chunk, and 80 ms with one, of which half are beyond the 40
    ],
)
def test_prompts_take_the_time_that_an_objective_leaves(sequences: int, stretch: float, part: float) -> None:
    replica = tpot_bound(sequences, 0.04)
    priced = replica_cost(QUERY, replica, False, 0, 0, 0)
    assert priced.prefill_s == pytest.approx(1000 * TOKEN_S)
    assert priced.own_s == pytest.approx(stretch * 1000 * TOKEN_S)
    assert disturbance_s(replica, 0.1) == pytest.approx((sequences + 1) * 0.1 * part)


def test_what_decodes_takes_its_part_of_full_steps_without_an_objective() -> None:
    priced = replica_cost(QUERY, tpot_bound(20, 0.0), False, 0, 0, 0)
    assert priced.own_s == pytest.approx(1000 * (TOKEN_S + 0.02 / (DEFAULT_BATCH_TOKENS - 20)))
    assert disturbance_s(tpot_bound(20, 0.0), 0.1) == pytest.approx(21 * 0.1)


def test_the_share_of_prompts_where_no_chunk_keeps_the_objective_is_the_scheduler_s() -> None:
    assert LEAST_PROMPT_SHARE == chunk_sizes._PROMPT_SHARE


def test_unmeasured_rates_have_defaults() -> None:
    unmeasured = state(sequences=1, prefill_tok_s=0.0, decode_step_s=0.0, transfer_tok_s=0.0)
    assert unmeasured.rates.token_s == TOKEN_S
    assert unmeasured.rates.step_s == pytest.approx(0.03 * (1 + DEFAULT_SEQUENCE_PART))
    assert unmeasured.rates.transfer_s == pytest.approx(DEFAULT_TRANSFER_RATIO * TOKEN_S)
    assert state(transfer_tok_s=0.0).rates.transfer_s == unmeasured.rates.transfer_s


@pytest.mark.parametrize(
    ("free", "matched", "penalty"),
    [
        (19, 0, 0.0),  # 1200 tokens are 18.75 blocks
        (18, 0, NO_SPACE_S + 64 * TOKEN_S),
        (-2, 0, NO_SPACE_S + 21 * 64 * TOKEN_S),
        (9, 640, 0.0),
        (8, 640, NO_SPACE_S + 64 * TOKEN_S),
    ],
)
def test_space_penalty(free: int, matched: int, penalty: float) -> None:
    assert space_penalty_s(QUERY, held(state(free=free), matched)) == pytest.approx(penalty)


def test_what_never_fits_is_the_very_last_choice() -> None:
    huge = QUERY._replace(num_tokens=6400)
    candidate = decode_candidate(huge, replica_cost(huge, state(), False, 0, 0, 0), 10.0)
    assert candidate.cost_s > NEVER_FITS_S
    assert candidate.note == "never fits, no space now"


def test_one_that_cannot_serve_it_alone_is_the_last_choice() -> None:
    short, enough = (
        local_candidate(QUERY, held(state(max_local_tokens=num), 0), 10.0) for num in (1000, 1001)
    )
    assert short.cost_s == pytest.approx(enough.cost_s + NEVER_FITS_S)
    assert "never fits" in short.note
    assert "never fits" not in enough.note


@pytest.mark.parametrize(("num_tokens", "fits"), [(3199, True), (3200, False)])
def test_what_exceeds_the_share_of_its_group_never_fits(num_tokens: int, fits: bool) -> None:
    query = QUERY._replace(num_tokens=num_tokens, kv_share=0.5)
    replica = replica_cost(query, state(max_local_tokens=9000), False, 0, 0, 0)
    for candidate in (
        prefill_candidate(query, replica),
        decode_candidate(query, replica, 10.0),
        local_candidate(query, replica, 10.0),
    ):
        assert ("never fits" not in candidate.note) == fits


@pytest.mark.parametrize("too_small", ["prefill", "decode"])
def test_a_prompt_beyond_one_device_stays_at_a_replica_that_may_use_host_memory(too_small: str) -> None:
    huge = QUERY._replace(num_tokens=6400)
    sizes = {"prefill": 200, "decode": 200, too_small: 100}
    prefill = state("prefill", replica_id="p", total=sizes["prefill"])
    busy = state(sequences=50, free=sizes["decode"], total=sizes["decode"])
    candidates = [
        prefill_candidate(huge, replica_cost(huge, prefill, False, 0, 0, 0)),
        decode_candidate(huge, replica_cost(huge, busy, False, 0, 0, 0), 10.0),
        local_candidate(huge, replica_cost(huge, busy, False, 0, 0, 0), 10.0),
    ]
    assert ["never fits" in item.note for item in candidates] == [
        too_small == "prefill",
        too_small == "decode",
        False,
    ]
    choice = choose(candidates)
    assert choice is not None
    assert choice.prefill == ""


def test_local_terms_add_up() -> None:
    candidate = local_candidate(QUERY, held(state(backlog=10, sequences=2), 896), 10.0)
    step_s = 0.02 * (1 + 2 * DEFAULT_SEQUENCE_PART)
    own_s = 104 * TOKEN_S
    disturbed_s = 3 * own_s * own_s / 0.02
    assert candidate.step_s == pytest.approx(step_s)
    assert candidate.pressure_s == pytest.approx(10 * step_s + WORK_PART * own_s + disturbed_s)
    assert candidate.cost_s == pytest.approx(own_s + 10 * TOKEN_S + candidate.pressure_s)
    assert candidate.note == "disturbs by 16.2 ms"


# --------------------------------------------------------------------------------- what replicas measure


def test_a_replica_that_is_twice_as_slow_costs_twice_as_much() -> None:
    fast, slow = (
        prefill_candidate(QUERY, held(state("prefill", backlog=300, prefill_tok_s=rate), 640))
        for rate in (10_000.0, 5_000.0)
    )
    assert slow.cost_s == pytest.approx(2 * fast.cost_s)


def test_attention_to_what_lies_before_costs_too() -> None:
    measured = replace(state("prefill").report, prefill_token_s=8e-5, attention_token_s=1e-8)
    rates = rates_of(measured, 0)
    assert rates.prefill_s(1000, 0) == pytest.approx(0.08 + 1e-8 * 1000 * 500)
    assert rates.prefill_s(200, 800) == pytest.approx(0.016 + 1e-8 * 200 * 900)
    corrected = rates_of(measured, 0, 2.0)
    assert corrected.prefill_s(200, 800) == pytest.approx(2 * rates.prefill_s(200, 800))
    assert corrected.token_s == rates.token_s, "its rate is measured, with whatever disturbs it"
    assert (corrected.step_s, corrected.present_step_s) == (rates.step_s, rates.present_step_s)


def test_a_prompt_is_computed_between_decodes() -> None:
    measured = replace(
        state("both").report,
        prefill_token_s=1e-4,
        num_running=10,
        num_context_tokens=5000,
        decode_sequence_s=0.001,
        decode_context_s=2e-6,
        max_batch_tokens=110,
    )
    busy = rates_of(measured, 10)
    assert busy.mixed_s == pytest.approx((10 * 0.001 + 5000 * 2e-6) / 100)
    of = CurrentLoad("both", measured, 0, 10, 100, busy)
    cost = replica_cost(QUERY, of, False, 0, 0, 0)
    assert cost.prefill_s == pytest.approx(0.1)
    assert cost.own_s == pytest.approx(0.1 + 1000 * busy.mixed_s)
    assert local_candidate(QUERY, cost, 0.0).prefill_s == cost.own_s


def test_what_is_held_counts_by_the_part_that_goes_before() -> None:
    base = state("both", backlog=1000, sequences=12)
    of = base._replace(num_queued_tokens=600, num_queued_sequences=8, num_places=4.0, residence_s=2.0)
    for part, tokens, sequences in ((0.0, 400, 4), (0.5, 700, 8), (1.0, 1000, 12)):
        cost = replica_cost(QUERY, of, False, 0, 0, 0, queued_part=part)
        assert cost.queue_s == pytest.approx(tokens * TOKEN_S)
        assert cost.place_wait_s == pytest.approx((sequences + 1 - 4) * 0.5)
    assert disturbance_s(of, 1.0) == pytest.approx(4.0), "what is held is not disturbed"


def test_a_pair_waits_for_its_queue_and_its_place_at_once() -> None:
    candidates = [
        Candidate("p", "prefill", 0, 10, 3.0, 0.0, 0.0, 3.5),
        Candidate("d", "decode", 0, 10, 2.0, 0.0, 0.0, 2.5),
    ]
    choice = choose(candidates)
    assert choice is not None
    assert choice.pair_cost_s == pytest.approx(6.0 - OVERLAP * 2.0)


def test_a_step_grows_with_its_sequences_and_their_context() -> None:
    measured = replace(
        state(sequences=4).report,
        decode_base_s=0.01,
        decode_sequence_s=0.001,
        decode_context_s=1e-6,
        num_context_tokens=4000,
    )
    step_s = 0.01 + 5 * (0.001 + 1000 * 1e-6)
    assert rates_of(measured, 4).step_s == pytest.approx(step_s)
    # One that has just come is taken to be as fast as the fastest of the others.
    new = replace(measured, decode_step_s=0.0, decode_base_s=0.0, decode_sequence_s=0.0, num_context_tokens=0)
    slower = replace(measured, decode_base_s=0.02)
    assert rates_of(new, 4, others=lambda: (new, slower, measured)).step_s == pytest.approx(step_s)


# ---------------------------------------------------------------------------------- what the store holds


def test_the_prompt_is_shared_out_by_tier() -> None:
    rates = {"dram": 200_000.0, "nvme": 40_000.0}
    replica = state("prefill", backlog=300, load_tok_s=rates)
    candidate = prefill_candidate(QUERY, replica_cost(QUERY, replica, False, 2, 4, 6))
    assert (candidate.matched_tokens, candidate.dram_tokens, candidate.nvme_tokens) == (128, 256, 384)
    assert candidate.uncached_tokens == 1000 - 128 - 256 - 384
    assert candidate.load_s == pytest.approx(256 / 200_000 + 384 / 40_000)
    assert candidate.pressure_s == pytest.approx(WORK_PART * 232 * TOKEN_S), "only computing delays others"
    expected_s = (232 + 300 + WORK_PART * 232) * TOKEN_S + candidate.load_s
    assert candidate.cost_s == pytest.approx(expected_s)


def test_a_local_candidate_loads_too() -> None:
    replica = state(sequences=2, load_tok_s={"dram": 100_000.0})
    candidate = local_candidate(QUERY, replica_cost(QUERY, replica, False, 0, 14, 0), 10.0)
    assert (candidate.dram_tokens, candidate.uncached_tokens) == (896, 104)
    without = local_candidate(QUERY, held(state(sequences=2), 896), 10.0)
    assert candidate.cost_s == pytest.approx(without.cost_s + 896 / 100_000)


def test_at_the_decode_side_of_a_pair_only_the_device_counts() -> None:
    with_store = replica_cost(QUERY, state(), False, 5, 5, 5)
    without = replica_cost(QUERY, state(), False, 5, 0, 0)
    candidate = decode_candidate(QUERY, with_store, 10.0)
    assert candidate == decode_candidate(QUERY, without, 10.0)
    assert (candidate.matched_tokens, candidate.uncached_tokens) == (320, 680)


def test_blocks_in_the_store_need_space_on_the_device() -> None:
    full = replica_cost(QUERY, state(free=18), False, 0, 15, 0)
    assert space_penalty_s(QUERY, full) == pytest.approx(NO_SPACE_S + 64 * TOKEN_S)


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_the_time_to_load_a_token(tier: str) -> None:
    def load_s(of: CurrentLoad) -> float:
        return {"dram": of.rates.dram_s, "nvme": of.rates.nvme_s}[tier]

    assert load_s(state(load_tok_s={tier: 40_000.0})) == 1 / 40_000
    for unmeasured in (
        state(),
        state(load_tok_s={tier: 0.0}),
        state(prefill_tok_s=0.0, load_tok_s={tier: 1.0}),
    ):
        assert load_s(unmeasured) == pytest.approx(DEFAULT_LOAD_RATIO[tier] * TOKEN_S)


def test_what_loads_slower_than_it_computes_is_computed() -> None:
    slow = state(load_tok_s={"dram": 100_000.0, "nvme": 9_000.0})
    made = replica_cost(QUERY, slow, False, 1, 2, 3)
    assert (made.matched_tokens, made.uncached_tokens) == (64, 808)
    assert (made.dram_tokens, made.nvme_tokens) == (128, 0)
    assert made.load_s == pytest.approx(128 / 100_000)


@given(device=st.integers(0, 20), dram=st.integers(0, 20), nvme=st.integers(0, 20))
def test_the_parts_make_the_prompt_and_one_token_is_computed(device: int, dram: int, nvme: int) -> None:
    made = replica_cost(QUERY, state(), False, device, dram, nvme)
    parts = made.matched_tokens, made.dram_tokens, made.nvme_tokens, made.uncached_tokens
    assert sum(parts) == QUERY.num_tokens
    assert min(parts) >= 0
    assert made.uncached_tokens == max(1, QUERY.num_tokens - 64 * (device + dram + nvme))
    assert made.load_s == pytest.approx((0.1 * made.dram_tokens + 0.5 * made.nvme_tokens) * TOKEN_S)


amounts = st.integers(0, 4).map(float) | st.floats(0, 1e13, allow_nan=False)
ids = st.lists(st.sampled_from("abcdef"), unique=True, max_size=5)


@given(st.data())
def test_choice_is_the_least_of_all_pairs(data: st.DataObject) -> None:
    candidates = []
    for side in ("prefill", "decode", "local"):
        for replica_id in data.draw(ids):
            uncached = data.draw(st.integers(1, 7))
            transfer, cost, queue, load, prefill = (data.draw(amounts) for _ in range(5))
            made = Candidate(replica_id, side, 7 - uncached, uncached, queue, transfer, 0.0, cost)
            candidates.append(replace(made, load_s=load, prefill_s=prefill))
    limit = data.draw(st.none() | st.builds(TimeLimit, amounts, amounts))
    choice = choose(candidates, limit=limit)

    def is_late(one: Candidate, queue_s: float) -> bool:
        wait_s = max(one.queue_s, one.load_s, queue_s)
        return limit is not None and (wait_s > limit.wait_s or wait_s + one.prefill_s > limit.ttft_s)

    has_local = any(item.side == "local" and not is_late(item, 0.0) for item in candidates)
    has_pair = any(
        one.side == "prefill"
        and two.side == "decode"
        and one.replica_id != two.replica_id
        and not is_late(one, two.queue_s)
        for one in candidates
        for two in candidates
    )
    if choice is None:
        assert not has_local
        assert not has_pair
        return
    decision = Decision("q", "cost", choice.prefill, choice.decode, 0, 0, tuple(candidates), "", limit=limit)
    assert recompute(decision) == (choice.prefill, choice.decode)
    assert choice.prefill != choice.decode


def test_ties() -> None:
    """Serving alone wins a tie; else what comes first."""

    def candidate(replica_id: str, side: str, cost: float) -> Candidate:
        return Candidate(replica_id, side, 0, 10, 0.0, 0.0, 0.0, cost)

    pairs = [candidate(*item, 1.0) for item in (("z", "prefill"), ("p", "prefill"), ("y", "decode"))]
    choice = choose([*pairs, candidate("d", "decode", 1.0)])
    assert choice is not None
    assert (choice.prefill, choice.decode) == ("z", "y")
    alone = choose([*pairs, candidate("y", "local", 2.0), candidate("d", "local", 2.0)])
    assert alone is not None
    assert (alone.prefill, alone.decode) == ("", "y")
