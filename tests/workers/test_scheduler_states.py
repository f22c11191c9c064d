"""Sequences with recurrent states: where prompts start and end their chunks, which states stay, and what
becomes of those that are lost."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from staged_engine import (
    BLOCK_TOKENS,
    StagedEngine,
    ask,
    engine,
    finish,
    pack,
    plan,
    right,
    step,
    unpack,
)

from kvtransfer.messages import BlockSpan
from workers.errors import OutOfBlocksError
from workers.messages.link import SampleState
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.step import StepOutcome

LONG = [number % 20 + 1 for number in range(23)]


def states(num_blocks: int = 12, *, num_stages: int = 1, **settings: Any) -> StagedEngine:
    return engine(states=[num_blocks], num_stages=num_stages, **{"chunk_tokens": 16, **settings})


def run_prompt(side: StagedEngine, name: str, prompt: list[int], *message_ends: int) -> list[tuple[int, int]]:
    """Run a request to its end; return the chunks of its prompt."""
    submission = ask(name, prompt, max_tokens=2, message_ends=message_ends)
    side.scheduler.submit(submission, 0.0)
    chunks: list[tuple[int, int]] = []
    outputs: list[int] = []
    while side.plan(0.0):
        chunks += [(entry.start, entry.start + entry.num_tokens) for entry in side.plans[-1].entries]
        outputs += [token for delta in side.settle(0.0).tokens for token in unpack(delta.tokens)]
        side.check()
    assert outputs == right(submission)
    return chunks


def test_the_last_border_of_a_prompt_has_a_state() -> None:
    side = states()
    assert run_prompt(side, "a", LONG) == [(0, 16), (16, 20), (20, 23)]
    assert run_prompt(side, "b", LONG) == [(20, 23)], "the same prompt again"
    assert run_prompt(side, "c", [*LONG, 5, 5, 5, 5]) == [(20, 24), (24, 27)], "the next turn"


def test_a_prompt_of_whole_blocks_starts_again_before_its_last() -> None:
    side, whole = states(), LONG[:20]
    assert run_prompt(side, "a", whole) == [(0, 16), (16, 20)]
    assert run_prompt(side, "b", whole) == [(16, 20)]
    assert run_prompt(side, "c", [*whole, 7, 7]) == [(20, 22)]


def test_where_a_prompt_left_the_way_of_another_the_third_starts() -> None:
    side = states()
    run_prompt(side, "a", LONG)
    other, third = [*LONG[:9], *[3] * 10], [*LONG[:8], *[4] * 8]
    assert run_prompt(side, "b", other)[0] == (0, 8), "the state behind the common part was not kept"
    assert run_prompt(side, "c", third)[0] == (8, 12)


def test_a_long_prompt_has_states_in_between() -> None:
    side = states(snapshot_every_tokens=8)
    assert run_prompt(side, "a", LONG) == [(0, 8), (8, 16), (16, 20), (20, 23)]
    assert run_prompt(side, "b", [*LONG[:9], 9, 9])[0][0] == 8


def test_the_second_chat_starts_behind_the_message_of_the_system() -> None:
    side, other = states(), [*LONG[:10], *[3] * 10]
    assert run_prompt(side, "a", LONG, 10, 20) == [(0, 8), (8, 20), (20, 23)]
    assert run_prompt(side, "b", other, 10, 18)[0] == (8, 16)


def test_a_turn_that_renders_the_beginning_of_the_answer_anew_starts_before_it() -> None:
    side = states()
    assert run_prompt(side, "a", LONG, 18) == [(0, 16), (16, 23)]
    assert run_prompt(side, "b", [*LONG[:18], *[3] * 8], 18, 24)[0] == (16, 24)


def test_a_chat_continues_where_the_answer_ended() -> None:
    """The last border that the answer passed is kept as one of a prompt, the others go first."""
    side = states(num_blocks=6)
    submission = ask("a", LONG, max_tokens=12)
    side.scheduler.submit(submission, 0.0)
    finish(side)
    whole = [*LONG, *right(submission)]
    assert run_prompt(side, "b", [*whole, 1])[0][0] == 32


def test_a_small_budget_still_computes_a_prompt() -> None:
    side = states(max_batch_tokens=3)
    assert run_prompt(side, "a", LONG)[:3] == [(0, 3), (3, 4), (4, 7)]


def test_samples_continue_one_state_each() -> None:
    side = states()
    submission = ask("a", LONG, n=3, max_tokens=6)
    side.scheduler.submit(submission, 0.0)
    outputs = finish(side)
    assert outputs == {("a", index): right(submission, index) for index in range(3)}


@pytest.mark.parametrize("num_blocks", [2, 3, 5])
def test_few_states_preempt_and_end_all_the_same(num_blocks: int) -> None:
    side = states(num_blocks)
    asked = [ask(name, [*LONG[index:], index + 1], max_tokens=7) for index, name in enumerate("abcd")]
    for submission in asked:
        side.scheduler.submit(submission, 0.0)
    assert finish(side) == {(it.request_id, 0): right(it) for it in asked}


def test_a_long_beginning_outlasts_ends_of_short_prompts() -> None:
    side, other = states(num_blocks=8), [*LONG[:10], *[3] * 10]
    run_prompt(side, "a", LONG, 10, 20)
    for number in range(6):
        run_prompt(side, f"short {number}", [20, number, 20, 20, 20])
    assert run_prompt(side, "b", other, 10, 18)[0] == (8, 16)


def test_the_next_turn_is_worth_what_the_one_before_is_not_there_for() -> None:
    """The second turn passes the end of the first, which goes then: without its own end, all is computed."""
    side = states()
    run_prompt(side, "a", LONG)
    run_prompt(side, "b", [*LONG, 5, 5, 5, 5])
    (pool,) = side.group_pools
    worths = sorted(pool.worth(block) for key in pool.keys if (block := pool.find(key)) is not None)
    assert worths[-1] == 6


def test_passed_states_go_first_and_kept_ones_by_use() -> None:
    pool = GroupPool(2, 3, has_states=True)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register(block, key, "")
    pool.release(blocks[:1])
    pool.release(blocks[1:], passed=True)
    pool.keep(b"b")
    pool.check()
    taken = [pool.allocate(1) for _ in range(2)]
    assert taken == [[blocks[2]], [blocks[0]]]
    assert pool.find(b"b") == blocks[1]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)


# ------------------------------------------------------------------------------------------ lost states


def lose(side: StagedEngine, *names: str) -> StepOutcome:
    """Settle the oldest plan: the states of these requests have changed, and nobody knows how."""
    lost = [work.slot for work, sequence in side.oldest_works() if sequence.request.key[0] in names]
    outcome = side.settle(0.0, lost)
    side.check()
    return outcome


def test_a_lost_state_is_computed_again_from_the_last_snapshot() -> None:
    side = states()
    lost, other = ask("lost", LONG, max_tokens=10), ask("other", [4, 5, 6], max_tokens=10)
    for submission in (lost, other):
        side.scheduler.submit(submission, 0.0)
    told: dict[tuple[str, int], list[int]] = {("lost", 0): [], ("other", 0): []}

    def take(outcome: StepOutcome) -> None:
        assert not outcome.failures
        for delta in outcome.tokens:
            told[delta.request_id, delta.sample] += unpack(delta.tokens)

    while len(told["lost", 0]) < 3:
        take(step(side))
    plan(side)
    take(lose(side, "lost"))
    assert side.scheduler.life.num_preemptions == 1
    take(step(side))
    again = side.plans or side.scheduler.issued
    assert not again
    rest = finish(side)
    for key, tokens in rest.items():
        told[key] += tokens
    assert told == {("lost", 0): right(lost), ("other", 0): right(other)}


def test_it_starts_behind_the_border_that_it_passed_last() -> None:
    side = states()
    side.scheduler.submit(ask("a", LONG, max_tokens=10), 0.0)
    for _ in range(6):  # three chunks, and tokens up to position 25
        step(side)
    plan(side)
    lose(side, "a")
    (entry,) = plan(side).entries
    assert (entry.start, entry.num_tokens) == (24, 3), "the block before it is read, and another one written"


@pytest.mark.parametrize("num_stages", [1, 2])
def test_plans_that_are_out_lose_it_too(num_stages: int) -> None:
    side = states(num_stages=num_stages)
    submission = ask("a", LONG, max_tokens=9)
    side.scheduler.submit(submission, 0.0)
    told: list[int] = []
    while len(told) < 2:
        told += [token for delta in step(side).tokens for token in unpack(delta.tokens)]
    while side.plan(0.0) and len(side.steps) < 2:
        pass
    while side.steps:
        assert not lose(side, "a").failures
    told += finish(side)["a", 0]
    assert told == right(submission)


def test_samples_that_lose_their_states_are_computed_again() -> None:
    side = states()
    submission = ask("a", LONG, n=3, max_tokens=6)
    side.scheduler.submit(submission, 0.0)
    told: dict[tuple[str, int], list[int]] = {("a", index): [] for index in range(3)}
    for number in range(5):
        plan(side)
        outcome = lose(side, "a") if number == 4 else side.settle(0.0)
        for delta in outcome.tokens:
            told[delta.request_id, delta.sample] += unpack(delta.tokens)
    for key, tokens in finish(side).items():
        told[key] += tokens
    assert told == {("a", index): right(submission, index) for index in range(3)}


@pytest.mark.parametrize(("num_stages", "num_out"), [(1, 1), (1, 2), (3, 6)])
def test_samples_that_were_handed_over_do_not_start_from_a_prompt_that_lost_its_state(
    num_stages: int, num_out: int
) -> None:
    """The prompt is repaired here. Its last step samples nothing, for every sample has its first token, so no
    rank connects that step's failure with the other samples."""
    side = states(num_stages=num_stages, chunk_tokens=4)
    whole = ask("a", LONG, n=3, max_tokens=6)
    told = {("a", index): right(whole, index)[:1] for index in range(3)}
    samples = tuple(SampleState(index, 7 + index, pack(told["a", index])) for index in range(3))
    blocks = side.pool.allocate(-(-len(LONG) // BLOCK_TOKENS))
    handed_over = replace(whole, samples=samples)
    assert side.scheduler.adopt(handed_over, blocks, 0, 0.0, [BlockSpan(0, ())]) == []
    has_lost = False
    while not side.scheduler.is_idle:
        while side.plan(0.0) and len(side.steps) < num_out:
            pass
        (work, *_), *_ = side.oldest_works()
        is_last_chunk = work.start + work.num_tokens == len(LONG)
        outcome = lose(side, "a") if is_last_chunk and not has_lost else side.settle(0.0)
        has_lost |= is_last_chunk
        assert not outcome.failures
        for delta in outcome.tokens:
            told[delta.request_id, delta.sample] += unpack(delta.tokens)
    assert has_lost
    assert told == {("a", index): right(whole, index) for index in range(3)}


def test_who_loses_a_state_twice_runs_alone_until_it_is_cleared() -> None:
    side = states()
    pair = [ask("a", LONG, max_tokens=12), ask("b", [4, 5, 6], max_tokens=12)]
    for submission in pair:
        side.scheduler.submit(submission, 0.0)
    for _ in range(2):
        for _ in range(4):
            step(side)
        plan(side)
        assert not lose(side, "a", "b").failures
    assert {key[0] for key in side.scheduler.life.suspects} == {"a", "b"}
    finish(side)  # whose checks see that suspects are alone in their plans
    assert not side.scheduler.life.suspects


def test_a_prompt_that_is_handed_over_fails_with_its_state() -> None:
    """Its blocks may be on their way."""
    side = states(max_batch_tokens=3)
    side.scheduler.submit(ask("a", LONG, decode="decode"), 0.0)
    side.scheduler.landings_wanted(0.0)
    side.scheduler.grant_landing("a", 1)
    step(side)
    plan(side)
    (failure,) = lose(side, "a").failures
    assert (failure.code, failure.suspect) == ("internal", True)
    assert side.scheduler.is_idle
