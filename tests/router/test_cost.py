"""Every term of the cost, by hand; and the choice against trying every pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cost import (
    DEFAULT_TRANSFER_RATIO,
    NEVER_FITS_TOKENS,
    NO_ROOM_TOKENS,
    STALE_TOKENS,
    WORK_PART,
    Ask,
    Option,
    choose,
    decode_candidate,
    disturbance_tokens,
    local_candidate,
    prefill_candidate,
    recompute,
    room_penalty_tokens,
    transfer_ratio,
)
from router.load import LoadState
from router.messages import Candidate, Decision

ASK = Ask(1000, 200, 1, 64, 64, True)


def state(
    role: str = "decode",
    backlog: int = 0,
    sequences: int = 0,
    free: int = 100,
    prefill_tok_s: float = 10_000.0,
    decode_step_s: float = 0.02,
    transfer_tok_s: float = 50_000.0,
) -> LoadState:
    return LoadState(
        "r", role, backlog, sequences, free, 100, prefill_tok_s, decode_step_s, transfer_tok_s, 0.0
    )


def test_prefill_terms() -> None:
    candidate = prefill_candidate(ASK, Option(state("prefill", backlog=300), 640, False))
    assert (candidate.matched_tokens, candidate.uncached_tokens) == (640, 360)
    assert candidate.pressure_tokens == WORK_PART * 360
    assert candidate.cost == 360 + 300 + WORK_PART * 360
    assert candidate.transfer_tokens == 1000 * 10_000 / 50_000
    stale = prefill_candidate(ASK, Option(state("prefill", backlog=300), 640, True))
    assert (stale.cost, stale.note) == (candidate.cost + STALE_TOKENS, "stale load")


def test_a_both_replica_prefills_at_the_expense_of_its_streams() -> None:
    candidate = prefill_candidate(ASK, Option(state("both", sequences=3), 0, False))
    assert candidate.pressure_tokens == WORK_PART * 1000 + 3 * 1000
    assert candidate.cost == candidate.pressure_tokens + 1000


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
    assert disturbance_tokens(state(role, sequences=sequences), uncached) == pytest.approx(tokens)


def test_unmeasured_rates_have_defaults() -> None:
    unmeasured = state(sequences=1, prefill_tok_s=0.0, decode_step_s=0.0, transfer_tok_s=0.0)
    assert disturbance_tokens(unmeasured, 150) == pytest.approx(2 * 150 * 0.5)
    assert transfer_ratio(unmeasured) == DEFAULT_TRANSFER_RATIO
    assert transfer_ratio(state(transfer_tok_s=0.0)) == DEFAULT_TRANSFER_RATIO


@pytest.mark.parametrize(
    ("free", "matched", "penalty"),
    [
        (19, 0, 0.0),  # 1200 tokens are 18.75 blocks
        (18, 0, NO_ROOM_TOKENS + 64),
        (-2, 0, NO_ROOM_TOKENS + 21 * 64),
        (9, 640, 0.0),
        (8, 640, NO_ROOM_TOKENS + 64),
    ],
)
def test_room(free: int, matched: int, penalty: float) -> None:
    assert room_penalty_tokens(ASK, Option(state(free=free), matched, False)) == penalty


def test_what_never_fits_is_the_very_last_choice() -> None:
    huge = ASK._replace(num_tokens=6400)
    candidate = decode_candidate(huge, Option(state(), 0, False), 64.0)
    assert candidate.cost > NEVER_FITS_TOKENS
    assert candidate.note == "never fits"


def test_local_terms_add_up() -> None:
    candidate = local_candidate(ASK, Option(state(backlog=10, sequences=2), 900, False), 64.0)
    disturbance = 3 * 100 * 0.5
    assert candidate.pressure_tokens == pytest.approx(2 * 64 + WORK_PART * 100 + disturbance)
    assert candidate.cost == pytest.approx(100 + 10 + candidate.pressure_tokens)
    assert candidate.note == "disturbs by 150"


amounts = st.integers(0, 4).map(float) | st.floats(0, 1e13, allow_nan=False)
ids = st.lists(st.sampled_from("abcdef"), unique=True, max_size=5)


@given(st.data())
def test_choice_is_the_least_of_all_pairs(data: st.DataObject) -> None:
    candidates = []
    for side in ("prefill", "decode", "local"):
        for replica_id in data.draw(ids):
            uncached = data.draw(st.integers(1, 7))
            transfer, cost = data.draw(amounts), data.draw(amounts)
            candidates.append(Candidate(replica_id, side, 7 - uncached, uncached, 0.0, transfer, 0.0, cost))
    choice = choose(candidates)
    has_local = any(item.side == "local" for item in candidates)
    has_pair = any(
        one.side == "prefill" and two.side == "decode" and one.replica_id != two.replica_id
        for one in candidates
        for two in candidates
    )
    if choice is None:
        assert not has_local
        assert not has_pair
        return
    decision = Decision("q", "cost", choice.prefill, choice.decode, 0, 0, tuple(candidates), "")
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
