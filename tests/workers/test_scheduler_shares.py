"""Shares of the device's KV blocks: a group at its share waits or gives way itself, and nobody else does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples
from staged_engine import BLOCK_TOKENS, StagedEngine, ask, engine, finish, plan, right, step

from kvtransfer.common.group_shares import GroupShares, ShareClaim
from workers.errors import CapacityError, QueueFullError
from workers.messages.link import Submission
from workers.scheduler.sequence import HeldBack, Phase, Sequence

NUM_BLOCKS = 40
A_HAS = GroupShares(1.0, {"a": 0.3})
LIMIT = 12
# Enough of everything else.
ROOMY: dict[str, Any] = {"max_batch_tokens": 512, "chunk_tokens": 512, "max_sequences": 64}


def tokens(number: int, count: int) -> list[int]:
    """A prompt that no other number begins with."""
    return [1 + number % 22, 1 + number // 22, *[5] * (count - 2)]


def limited(num_blocks: int = NUM_BLOCKS, shares: GroupShares = A_HAS, **settings: Any) -> StagedEngine:
    return engine(num_blocks, shares=shares, **{**ROOMY, **settings})


def submitted(side: StagedEngine, *submissions: Submission) -> None:
    for submission in submissions:
        side.scheduler.submit(submission, 0.0)


def running(side: StagedEngine) -> list[str]:
    return [sequence.request.submission.request_id for sequence in side.scheduler.life.running]


def sequence_of(side: StagedEngine, name: str) -> Sequence:
    return side.scheduler.life.requests[name, 1].sequences[0]


REQUESTS = st.lists(
    st.tuples(st.integers(2, 24), st.integers(1, 12), st.sampled_from([0, 0, 1])), min_size=1, max_size=12
)


@settings(max_examples=examples(150), deadline=None)
@given(flood=REQUESTS, others=REQUESTS, num_steps=st.integers(0, 8), num_offload=st.sampled_from([0, 0, 9]))
def test_a_flood_holds_back_nobody_else(
    flood: list[tuple[int, int, int]],
    others: list[tuple[int, int, int]],
    num_steps: int,
    num_offload: int,
) -> None:
    """Another group's request is in the very next plan, whatever the flood's priorities, and stays."""
    side = engine(NUM_BLOCKS, offload=num_offload, shares=A_HAS, offload_at=1.0, **ROOMY)
    submissions = []
    for number, (num_prompt, max_tokens, priority) in enumerate(flood):
        prompt = tokens(number, num_prompt)
        submissions.append(ask(f"a{number}", prompt, max_tokens=max_tokens, priority=priority, group="a"))
    submitted(side, *submissions)
    outputs: dict[tuple[str, int], list[int]] = {}

    def go() -> None:
        for delta in step(side).tokens:
            outputs.setdefault((delta.request_id, delta.sample), []).extend(
                int.from_bytes(delta.tokens[at : at + 4], "little") for at in range(0, len(delta.tokens), 4)
            )
        assert side.pool.num_used_by("a") <= LIMIT

    for _ in range(num_steps):
        if not side.scheduler.is_idle:
            go()
    # At most so many of the flood run, each with a block and one to spare.
    num_left = NUM_BLOCKS - 2 * LIMIT
    for number, (num_prompt, max_tokens, _) in enumerate(others):
        num_left -= -(-(num_prompt + max_tokens) // BLOCK_TOKENS) + 1
        if num_left < 0:
            break
        submission = ask(f"b{number}", tokens(100 + number, num_prompt), max_tokens=max_tokens, group="b")
        submissions.append(submission)
        submitted(side, submission)
        sequence = sequence_of(side, f"b{number}")
        go()
        assert sequence.phase is not Phase.WAITING
        assert sequence.num_settled >= num_prompt
        assert not sequence.preempted
    while not side.scheduler.is_idle:
        go()
    assert outputs == {(it.request_id, 0): right(it)[: len(outputs[it.request_id, 0])] for it in submissions}
    most = {"a": LIMIT * BLOCK_TOKENS, "b": 1 << 20}
    for it in submissions:
        num_prompt = len(it.prompt) // 4
        wanted = min(len(right(it)), most[it.sharing_group] - num_prompt)
        assert len(outputs[it.request_id, 0]) == wanted
    assert side.pool.num_referenced == 0


def test_a_group_waits_in_order_for_its_share_and_alone() -> None:
    side = limited()
    submitted(
        side,
        ask("a1", tokens(1, 32), group="a"),
        ask("a2", tokens(2, 20), group="a"),
        ask("a3", tokens(3, 4), group="a"),
        ask("b1", tokens(4, 32), group="b"),
    )
    step(side)
    assert running(side) == ["a1", "b1"], "a3 would fit, but is behind a2"
    finish(side)


def test_a_group_beyond_its_share_preempts_its_own_newest_alone() -> None:
    side = limited()
    asked = [
        ask("a1", tokens(1, 19), max_tokens=12, group="a"),
        ask("a2", tokens(2, 19), max_tokens=12, group="a"),
        ask("b1", tokens(3, 8), max_tokens=30, group="b"),
    ]
    submitted(side, *asked)
    step(side)
    assert running(side) == ["a1", "a2", "b1"]
    while "a2" in running(side):
        step(side)
    assert running(side) == ["a1", "b1"]
    assert sequence_of(side, "a2").preempted
    assert side.scheduler.life.num_preemptions == 1
    assert side.pool.num_free > 0
    finish(side)
    assert side.scheduler.life.num_preemptions == 1


def test_what_comes_back_to_others_is_not_waited_for() -> None:
    """The group's own newest gives way, though sequences of another group end in every step."""
    side = limited()
    submitted(side, *(ask(f"a{number}", tokens(number, 19), max_tokens=12, group="a") for number in (1, 2)))
    for number in range(40):
        submitted(side, ask(f"b{number}", tokens(50 + number, 4), max_tokens=2, group="b"))
        plan(side)
        if len(side.plans) > 1:
            side.settle(0.0)
        if side.scheduler.life.num_preemptions:
            break
    assert side.scheduler.life.num_preemptions == 1
    assert "a1" in running(side)
    finish(side)


def test_blocks_come_back_to_the_group_that_they_belong_to() -> None:
    side = limited()
    submitted(side, ask("a1", tokens(1, 9), max_tokens=9, group="a"))
    submitted(side, ask("b1", tokens(2, 9), max_tokens=9, group="b"))
    step(side)
    comes_back = side.scheduler.life.blocks_come_back
    assert [comes_back(group) for group in ("a", "b", None)] == [False, False, False]
    plan(side)
    side.scheduler.cancel("b1", 1)
    assert [comes_back(group) for group in ("a", "b", None)] == [False, True, True]
    side.settle(0.0)
    submitted(side, ask("b2", tokens(3, 9), max_tokens=1, group="b"))
    plan(side)
    assert [comes_back(group) for group in ("a", "b", None)] == [False, True, True], (
        "it samples its last token"
    )
    side.settle(0.0)
    finish(side)


def test_what_exceeds_the_share_is_refused_by_name_and_output_is_cut_to_it() -> None:
    side = limited(10, GroupShares(0.4))
    with pytest.raises(CapacityError, match=r"^prompt: 16 tokens .* the 16 tokens .* 'a' .*; shorten it$"):
        side.scheduler.check_capacity(ask(prompt=tokens(1, 16), group="a"))
    with pytest.raises(CapacityError, match=r"^prompt: 17 tokens .* may use \(device_kv_share\)"):
        side.scheduler.check_capacity(ask(prompt=tokens(1, 17), group="a", decode="d"))
    side.scheduler.check_capacity(ask(prompt=tokens(1, 16), group="a", decode="d"))
    submitted(side, ask("a1", tokens(1, 13), max_tokens=9, group="a"))
    assert len(finish(side)["a1", 0]) == 3


def test_a_group_may_fill_its_share_of_the_queue_alone() -> None:
    side = limited(max_waiting=10)
    submitted(side, *(ask(f"a{number}", group="a") for number in range(3)))
    with pytest.raises(QueueFullError, match="3 requests of sharing group 'a' wait here, its share is 3"):
        side.scheduler.check_capacity(ask("a3", group="a"))
    submitted(side, *(ask(f"b{number}", group="b") for number in range(7)))
    with pytest.raises(QueueFullError, match="10 requests wait here"):
        side.scheduler.check_capacity(ask("b7", group="b"))
    finish(side)


def test_shared_prefixes_count_once() -> None:
    side = limited()
    prefix = tokens(1, 24)
    submitted(side, ask("a0", [*prefix, 2], max_tokens=9, group="a"))
    step(side)
    submitted(side, *(ask(f"a{number}", [*prefix, number], group="a") for number in (3, 4)))
    step(side)
    assert running(side) == ["a0", "a3", "a4"]
    assert side.pool.num_used_by("a") == 6 + 3
    finish(side)


def test_blocks_of_another_group_stay_on_the_device() -> None:
    side = engine(NUM_BLOCKS, offload=20, shares=A_HAS, offload_at=1.0, **ROOMY)
    asked = [
        ask("a1", tokens(1, 21), max_tokens=20, group="a"),
        ask("a2", tokens(2, 21), max_tokens=20, group="a"),
        ask("b1", tokens(3, 21), max_tokens=18, group="b"),
    ]
    submitted(side, *asked)
    outputs: dict[tuple[str, int], list[int]] = {}
    num_offloaded = 0
    while side.plan(0.0) or side.plans:
        for delta in side.settle(0.0).tokens:
            outputs.setdefault((delta.request_id, 0), []).append(int.from_bytes(delta.tokens, "little"))
        side.check()
        num_offloaded = max(num_offloaded, side.scheduler.life.tables.host.num_used)
        b1 = side.scheduler.life.requests.get(("b1", 1))
        assert b1 is None or b1.sequences[0].num_offloaded == 0
    assert num_offloaded > 0
    assert outputs == {(it.request_id, 0): right(it) for it in asked}
    assert side.scheduler.life.num_preemptions == 0


def test_a_block_that_another_group_gives_up_changes_its_owner() -> None:
    side = engine(12, offload=12, shares=GroupShares(1.0, {"a": 0.9}), offload_at=1.0, **ROOMY)
    asked = [
        ask("a1", tokens(1, 15), max_tokens=21, group="a"),
        ask("b1", tokens(2, 23), max_tokens=16, group="b"),
    ]
    submitted(side, *asked)
    outputs: dict[tuple[str, int], list[int]] = {}
    num_offloaded = 0
    while side.plan(0.0) or side.plans:
        for delta in side.settle(0.0).tokens:
            outputs.setdefault((delta.request_id, 0), []).append(int.from_bytes(delta.tokens, "little"))
        side.check()
        num_offloaded = max(num_offloaded, side.scheduler.life.tables.host.num_used)
    assert num_offloaded > 0
    assert outputs == {(it.request_id, 0): right(it) for it in asked}


# ----------------------------------------------------------------------------- landings and the store


def handed_over(name: str, number: int, count: int, group: str, decode: str = "d") -> Submission:
    return ask(name, tokens(number, count), group=group, decode=decode)


def wanted(side: StagedEngine, now: float = 0.0) -> list[str]:
    return [need.request_id for need in side.scheduler.landings_wanted(now)]


def test_prompts_that_wait_for_their_share_are_not_ahead_of_other_groups() -> None:
    side = limited(max_batch_tokens=64)
    submitted(side, *(handed_over(f"a{number}", number, 33, "a") for number in range(4)))
    assert wanted(side) == ["a0", "a1"]
    for name in ("a0", "a1"):
        side.scheduler.grant_landing(name, 1)
    step(side)
    assert wanted(side) == ["a2"], "a1 waits for the share that a0 has"
    side.scheduler.grant_landing("a2", 1)
    assert wanted(side) == [], "a1 and a2 are ahead of a3"
    submitted(side, handed_over("b0", 9, 33, "b"))
    assert wanted(side) == ["b0"]
    side.scheduler.grant_landing("b0", 1)
    plan(side)
    assert running(side) == ["b0"]
    side.settle(0.0)


def test_landings_that_may_wait_for_a_share_are_not_ahead_of_other_groups() -> None:
    side = limited(max_batch_tokens=64)
    submitted(side, *(handed_over(f"a{number}", number, 33, "a") for number in range(5)))
    assert wanted(side) == ["a0", "a1"]
    submitted(side, handed_over("b0", 9, 33, "b"))
    assert wanted(side, 0.1) == ["b0"], "a0 and a1 are ahead of their own group alone"
    assert wanted(side, 0.9) == []
    assert wanted(side, 1.1) == ["a2"], "the first of a group holds up nobody for long"
    assert wanted(side, 1.2) == []


def test_sequences_and_landings_of_a_group_take_turns_by_age() -> None:
    """Of what waits for the share, the older comes first, and whatever was preempted."""
    side = limited()
    submitted(side, ask("a1", tokens(1, 30), group="a"))
    step(side)
    side.pool.claim("landings", {"a": ShareClaim(3.0, 8)})
    side.scheduler.submit(ask("a2", tokens(2, 19), group="a"), 2.0)
    step(side)
    assert side.pool.num_claimed("sequences", "a", 3.0) == 5, "a landing that came at 3 leaves that to it"
    assert side.pool.num_claimed("sequences", "a", 1.0) == 0
    side.scheduler.cancel("a2", 1)
    side.scheduler.submit(ask("a3", tokens(3, 18), group="a"), 4.0)
    while "a1" in running(side):
        step(side)
    assert not side.plan(4.0), "the landing is older"
    assert running(side) == []
    side.pool.claim("landings", {})
    step(side)
    assert running(side) == ["a3"]
    finish(side)


def test_a_load_that_waits_for_its_share_holds_back_its_group_alone() -> None:
    side = engine(NUM_BLOCKS, shares=A_HAS, has_store=True, max_loading=1, **ROOMY)
    submitted(side, ask("a1", tokens(1, 9), group="a"), ask("a2", tokens(2, 9), group="a"))
    submitted(side, ask("b1", tokens(3, 9), group="b"))
    (first,) = side.scheduler.loads_wanted()
    assert first.request_id == "a1"
    assert side.scheduler.loads_wanted() == [], "one is loaded at a time"
    side.scheduler.hold_back(first, HeldBack.GROUP)
    (second,) = side.scheduler.loads_wanted()
    assert second.request_id == "b1"
    side.scheduler.end_load(second, {})
    step(side)
    assert running(side) == ["b1"]
    side.scheduler.end_load(first, {})
    (third,) = side.scheduler.loads_wanted()
    assert third.request_id == "a2"
    side.scheduler.end_load(third, {})
    finish(side)


# -------------------------------------------------------------------------------------------------- slots


def slots_of(side: StagedEngine, group: str) -> int:
    life = side.scheduler.life
    return sum(it.slot >= 0 and it.sharing_group == group for it in life._sequences())


@settings(max_examples=examples(100), deadline=None)
@given(
    max_sequences=st.integers(2, 9),
    share=st.sampled_from([0.01, 0.3, 0.5, 0.99]),
    flood=st.lists(st.tuples(st.integers(1, 3), st.integers(2, 9)), min_size=5, max_size=20),
    num_steps=st.integers(0, 6),
)
def test_a_flood_leaves_slots_to_others(
    max_sequences: int, share: float, flood: list[tuple[int, int]], num_steps: int
) -> None:
    """There are blocks enough for all; the group's share of the slots is rounded up."""
    shares = GroupShares(1.0, {"a": share})
    side = limited(400, shares, max_sequences=max_sequences, max_waiting=10_000)
    most = side.scheduler.life.slot_limit("a")
    assert most == min(it for it in range(1, max_sequences + 1) if it >= share * max_sequences - 1e-9)
    for number, (num_samples, max_tokens) in enumerate(flood):
        asked = ask(
            f"a{number}", tokens(number, 4), n=min(num_samples, most), max_tokens=max_tokens, group="a"
        )
        submitted(side, asked)
    for _ in range(num_steps):
        if not side.scheduler.is_idle:
            step(side)
            assert slots_of(side, "a") <= most
    for number in range(max_sequences - most):
        submitted(side, ask(f"b{number}", tokens(100 + number, 4), max_tokens=4, group="b"))
        sequence = sequence_of(side, f"b{number}")
        step(side)
        assert sequence.num_settled >= 4
    while not side.scheduler.is_idle:
        step(side)
        assert slots_of(side, "a") <= most


def test_more_samples_than_the_share_of_slots_are_refused() -> None:
    side = limited(400, GroupShares(1.0, {"a": 0.3}), max_sequences=4)
    with pytest.raises(
        CapacityError, match=r"^n: 3 samples, from 1 to 2 are the share of .* 'a' \(device_kv"
    ):
        submitted(side, ask("a", tokens(1, 4), n=3, group="a"))
    submitted(side, ask("b", tokens(1, 4), n=3, group="b"))
    finish(side)


def test_a_paused_sequence_gives_its_slot_to_one_of_its_group() -> None:
    """Which would otherwise wait for its end, and it for the other's."""
    side = limited(400, GroupShares(1.0, {"a": 0.5}), max_sequences=2)
    submitted(side, ask("slow", tokens(1, 4), max_tokens=20, group="a", service_class="batch"))
    step(side)
    side.scheduler.pause.ask(True)
    submitted(side, ask("fast", tokens(2, 4), max_tokens=3, group="a"))
    step(side)
    assert running(side) == ["fast"]
    finish(side)
