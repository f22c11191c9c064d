"""What the scheduler promises, one promise a test; `test_scheduler_machine` mixes them all."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from staged_engine import (
    BLOCK_TOKENS,
    END,
    MAX_CONTEXT,
    PROMPT,
    ROOT_KEY,
    alone,
    ask,
    engine,
    finish,
    pack,
    plan,
    right,
    step,
    unpack,
)

from kvtransfer.blocks.keys import extend_keys
from workers.errors import CapacityError, QueueFullError
from workers.messages.link import Submission
from workers.messages.sampling import SamplingParams


def test_decodes_go_first_and_chunks_share_what_is_left() -> None:
    side = engine(max_batch_tokens=8, chunk_tokens=6)
    side.scheduler.submit(ask("a", [1, 2]), 0.0)
    step(side)
    side.scheduler.submit(ask("b", list(range(1, 12))), 0.0)
    side.scheduler.submit(ask("c", list(range(21, 26))), 0.0)
    works = side.works(plan(side))
    assert [(work.start, work.num_tokens) for work in works] == [(0, 6), (0, 1), (2, 1)]
    assert [len(work.sample_slots) for work in works] == [0, 0, 1]


def test_priority_then_arrival() -> None:
    side = engine(max_sequences=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 2), ("d", 1)):
        side.scheduler.submit(ask(name, [ord(name)], max_tokens=1, priority=priority), 0.0)
    order = [delta.request_id for _ in range(4) for delta in step(side).tokens]
    assert order == ["c", "d", "a", "b"]


def test_decodes_beyond_the_budget_take_turns() -> None:
    side = engine(max_batch_tokens=2, max_sequences=4)
    side.scheduler.submit(ask(n=4, max_tokens=9), 0.0)
    for _ in range(12):
        step(side)
    counts = [len(sequence.output_bytes) // 4 for sequence in side.scheduler.life.running]
    assert sorted(counts) == [5, 5, 6, 6]


def test_a_token_not_yet_reported_is_planned_without_its_id() -> None:
    side = engine()
    submission = ask(max_tokens=3)
    side.scheduler.submit(submission, 0.0)
    first, second = plan(side), plan(side)
    assert first.entries[0].tokens == submission.prompt
    assert [(work.tokens, work.start) for work in side.works(second)] == [(b"", len(PROMPT))]
    side.settle(0.0)
    third = plan(side)
    assert (third.entries, third.decodes) == ((), pack([0]))
    assert not side.plan(0.0), "max_tokens are planned: nothing is left"
    assert finish(side) == {("a", 0): right(submission)[1:]}


def test_the_last_token_of_a_stopped_sequence_is_dropped_and_its_blocks_wait() -> None:
    side = engine(num_blocks=6)
    prompt = next([1, token] for token in range(1, 99) if alone([1, token], 7, 1, SamplingParams()) == [END])
    side.scheduler.submit(
        replace(ask(prompt=prompt, max_tokens=9), sampling=SamplingParams(max_tokens=9)), 0.0
    )
    plan(side)
    named = side.works(plan(side))[0].block_ids
    (delta,) = side.settle(0.0).tokens
    assert (unpack(delta.tokens), delta.finish) == ([END], "stop")
    assert all(side.pool.is_referenced(block) for block in named)
    assert side.scheduler.counts.num_running == 0
    assert side.settle(0.0).tokens == []
    assert side.pool.num_free == 6
    side.scheduler.submit(ask("b"), 0.0)
    assert plan(side).free_slots == (0,)


def test_samples_share_the_prompt_and_copy_its_last_block() -> None:
    side = engine()
    submission = ask(n=3, max_tokens=2)
    side.scheduler.submit(submission, 0.0)
    first = plan(side)
    (start,) = first.starts
    assert len(start.samples) == 3
    assert start.prompt == submission.prompt, "a penalty looks at it, and it is said once"
    assert [len(entry.sample_slots) for entry in first.entries] == [3]
    second = plan(side)
    assert len(second.copies) == 2, "the last holder writes in place"
    tables = [work.block_ids for work in side.works(second)]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert finish(side) == {("a", index): right(submission, index) for index in range(3)}


# ------------------------------------------------------------------------------------------- the cache


def test_generated_blocks_are_found_by_the_next_prompt() -> None:
    side = engine()
    submission = ask(max_tokens=12)
    side.scheduler.submit(submission, 0.0)
    output = finish(side)["a", 0]
    longer = ask("b", PROMPT + output + [1, 2])
    side.scheduler.submit(longer, 0.0)
    outcome = step(side)
    num_full = (len(PROMPT) + len(output) - 1) // BLOCK_TOKENS  # the last token's KV was never needed
    assert outcome.prompts[0].num_cached_tokens == num_full * BLOCK_TOKENS
    keys = [key for chain in side.pool.snapshot() for key in chain.keys]
    assert set(keys) == set(longer.block_keys)


def test_a_prompt_without_a_full_block_starts_at_the_tenants_root() -> None:
    side = engine()
    side.scheduler.submit(ask(prompt=[3], max_tokens=8), 0.0)
    output = finish(side)["a", 0]
    keys = extend_keys(ROOT_KEY, pack([3, *output]), BLOCK_TOKENS)
    assert side.pool.snapshot()[0].keys == keys
    assert side.pool.snapshot()[0].parent == b""


def test_a_wholly_cached_prompt_computes_its_last_block_only() -> None:
    side = engine()
    prompt = list(range(1, 13))
    side.scheduler.submit(ask("a", prompt, max_tokens=1), 0.0)
    finish(side)
    side.scheduler.submit(ask("b", prompt, max_tokens=1), 0.0)
    assert side.scheduler.counts.num_backlog_tokens == BLOCK_TOKENS
    assert [(work.start, work.num_tokens) for work in side.works(plan(side))] == [(8, 4)]
    assert side.settle(0.0).prompts[0].num_cached_tokens == 8


# ------------------------------------------------------------------------------------------ preemption


def test_the_latest_of_the_lowest_priority_is_preempted_and_loses_nothing() -> None:
    side = engine(num_blocks=8)
    asked = [
        ask("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=20, priority=1),
        ask("b", [11, 12, 13], max_tokens=20),
        ask("c", [21, 22, 23], max_tokens=20),
    ]
    for submission in asked:
        side.scheduler.submit(submission, 0.0)
    preempted: list[str] = []
    outputs: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    while side.plan(0.0) or side.plans:
        names = [sequence.request.submission.request_id for sequence in side.scheduler.life.waiting]
        preempted += [name for name in names if outputs[name] and name not in preempted]
        for delta in side.settle(0.0).tokens:
            assert delta.first_index == len(outputs[delta.request_id])
            outputs[delta.request_id] += unpack(delta.tokens)
    assert preempted == ["c", "b"]
    assert side.scheduler.life.num_preemptions >= 2
    assert outputs == {submission.request_id: right(submission) for submission in asked}


def test_a_preempted_sequence_waits_before_others_of_its_priority() -> None:
    side = engine(num_blocks=6)
    for name in "ab":
        side.scheduler.submit(ask(name, [ord(name)] * 7, max_tokens=12), 0.0)
    while side.scheduler.life.num_preemptions == 0:
        step(side)
    side.scheduler.submit(ask("c", [3], max_tokens=1), 0.0)
    names = [sequence.request.submission.request_id for sequence in side.scheduler.life.waiting]
    assert names == ["b", "c"]
    finish(side)


# ------------------------------------------------------------------------------- limits and deadlines


@pytest.mark.parametrize(
    ("submission", "text"),
    [
        (ask(prompt=[]), "prompt: it has 0 tokens"),
        (ask(prompt=[1] * MAX_CONTEXT), "prompt: 40 tokens and a new one exceed the 40 tokens of context"),
        (ask(prompt=[1] * 32), "prompt: 32 tokens and a new one exceed the 32 tokens of KV blocks"),
        (ask(max_tokens=0), "max_tokens: it is 0"),
        (ask(n=5), "n: 5 samples, from 1 to 4 fit this replica"),
        (ask(output=(1, 2, 3, 4)), r"samples\[0\].output: 4 tokens leave nothing .* at most 4 fit"),
        (replace(ask(), block_keys=(b"k", b"l")), "block_keys: 2 keys for 6 tokens, .* has 4 tokens"),
    ],
)
def test_what_never_fits_is_refused_by_name_and_number(submission: Submission, text: str) -> None:
    side = engine(num_blocks=8, max_sequences=4)
    with pytest.raises(CapacityError, match=text):
        side.scheduler.submit(submission, 0.0)
    assert side.scheduler.is_idle


def test_a_full_queue_and_a_second_arrival_are_refused() -> None:
    side = engine(max_waiting=1)
    side.scheduler.submit(ask("a"), 0.0)
    with pytest.raises(QueueFullError, match="1 requests wait here, the limit is 1"):
        side.scheduler.submit(ask("b"), 0.0)
    step(side)
    with pytest.raises(ValueError, match="attempt 1 of request a is here already"):
        side.scheduler.submit(ask("a"), 0.0)
    finish(side)


def test_output_is_clipped_to_context_and_kv() -> None:
    side = engine(num_blocks=4)
    submission = ask(max_tokens=1000)
    side.scheduler.submit(submission, 0.0)
    assert len(finish(side)["a", 0]) == 4 * BLOCK_TOKENS - len(PROMPT)


def test_a_deadline_ends_a_request_before_compute_and_while_it_runs() -> None:
    side = engine(max_sequences=1)
    side.scheduler.submit(ask("a", max_tokens=20, deadline_s=5.0), 10.0)
    side.scheduler.submit(ask("b", deadline_s=1.0), 10.0)
    step(side, 10.5)
    outcome = step(side, 11.0)
    assert [(failure.request_id, failure.code) for failure in outcome.failures] == [("b", "deadline")]
    assert "before it was scheduled" in outcome.failures[0].reason
    plan(side, 14.0)
    (failure,) = side.scheduler.life.expire(15.0)
    assert "after 2 tokens of output" in failure.reason
    assert side.settle(15.0).tokens == []
    assert side.scheduler.is_idle


def test_cancel_frees_at_once_what_no_plan_names() -> None:
    side = engine()
    side.scheduler.submit(ask("a", n=2), 0.0)
    step(side)
    assert side.scheduler.cancel("a", 1)
    assert not side.scheduler.cancel("a", 1)
    assert side.scheduler.is_idle
    assert side.pool.num_referenced == 0


# ------------------------------------------------------------------------------------------- hand-over


def test_a_prompt_to_hand_over_waits_for_its_landing_then_stops_after_its_first_tokens() -> None:
    side = engine(chunk_tokens=4)
    submission = ask(n=2, decode="d", max_tokens=3)
    side.scheduler.submit(submission, 1.0)
    side.scheduler.submit(ask("local", [9], max_tokens=1), 1.0)
    (need,) = side.scheduler.landings_wanted(0.0)
    assert (need.request_id, need.num_tokens) == ("a", 6)
    assert side.scheduler.landings_wanted(0.0) == []
    assert [delta.request_id for delta in step(side).tokens] == ["local"], "it is overtaken, not waited for"
    assert not side.plan(1.0)
    assert side.scheduler.grant_landing("a", 1)
    first = step(side, 2.0)
    assert [(chunk.num_computed_tokens, len(chunk.block_ids)) for chunk in first.chunks] == [(4, 1)]
    last = step(side, 3.0)
    assert [(chunk.num_computed_tokens, len(chunk.block_ids)) for chunk in last.chunks] == [(6, 2)]
    assert [unpack(delta.tokens) for delta in last.tokens] == [right(submission, i)[:1] for i in range(2)]
    (done,) = last.prompts
    assert (done.decodes_remotely, done.all_finished, done.num_computed_tokens) == (True, False, 6)
    assert (done.times.arrived, done.times.scheduled, done.times.prefilled) == (1.0, 2.0, 3.0)
    assert [unpack(sample.output) for sample in done.samples] == [right(submission, i)[:1] for i in range(2)]
    assert not side.plan(3.0)
    assert all(side.pool.is_referenced(block) for block in done.block_ids)
    assert side.scheduler.life.expire(1e9) == []
    assert side.scheduler.finish_hand_over("a", 1)
    assert not side.scheduler.finish_hand_over("a", 1)
    assert side.scheduler.is_idle
    assert side.pool.num_referenced == 0


def test_a_request_to_hand_over_that_ends_with_its_first_token_is_over_here() -> None:
    side = engine()
    side.scheduler.submit(ask(decode="d", max_tokens=1), 0.0)
    side.scheduler.grant_landing("a", 1)
    outcome = step(side)
    assert [delta.finish for delta in outcome.tokens] == ["length"]
    assert (outcome.prompts[0].all_finished, outcome.prompts[0].samples) == (True, ())
    assert side.scheduler.is_idle


def test_landings_are_asked_one_step_ahead_and_a_full_target_holds_back_its_own_only() -> None:
    side = engine(max_batch_tokens=8)
    for name, target in (("a", "d"), ("b", "d"), ("c", "e")):
        side.scheduler.submit(ask(name, [ord(name)] * 9, decode=target), 0.0)
    assert [need.request_id for need in side.scheduler.landings_wanted(0.0)] == ["a", "c"]
    side.scheduler.grant_landing("a", 1)
    assert side.scheduler.landings_wanted(0.0) == []
    step(side)
    assert [need.request_id for need in side.scheduler.landings_wanted(0.0)] == ["b"]


def test_one_that_waits_long_for_its_landing_is_passed_by_those_behind_it() -> None:
    """It may need nearly all of the target's blocks; one at a time, or a full target would be asked by
    all."""
    side = engine(max_batch_tokens=8)
    for name in "abcd":
        side.scheduler.submit(ask(name, [ord(name)] * 9, decode="d"), 0.0)
    asked = [
        [need.request_id for need in side.scheduler.landings_wanted(now)] for now in (5.0, 5.5, 6.0, 9.0)
    ]
    assert asked == [["a"], [], ["b"], []]
    side.scheduler.grant_landing("b", 1)
    step(side)
    assert [need.request_id for need in side.scheduler.landings_wanted(9.0)] == ["c"]


@pytest.mark.parametrize("num_valid", [6, 4, 0])
def test_an_adopted_request_goes_on_and_repairs_what_is_not_valid(num_valid: int) -> None:
    side = engine()
    submission = ask(n=2, decode="d", max_tokens=5)
    blocks = side.pool.allocate(2)
    for position, token in enumerate(PROMPT):
        side.stages[0].kv[blocks[position // 4], position % 4] = token if position < num_valid else 99
    samples = tuple(
        replace(sample, output=pack(right(submission, sample.index)[:1])) for sample in submission.samples
    )
    assert side.scheduler.adopt(replace(submission, samples=samples), blocks, num_valid, 0.0) == []
    assert finish(side) == {("a", index): right(submission, index)[1:] for index in range(2)}
    assert side.pool.match(submission.block_keys) == blocks[:1]


def test_an_adopted_request_without_capacity_for_another_token_ends_at_once() -> None:
    side = engine(num_blocks=2)
    submission = ask(prompt=[1] * 7, output=(5,), decode="d")
    ends = side.scheduler.adopt(submission, side.pool.allocate(2), 7, 0.0)
    assert [(end.first_index, end.tokens, end.finish) for end in ends] == [(1, b"", "length")]
    assert side.scheduler.is_idle
    assert side.pool.num_referenced == 0


def test_a_resumed_request_goes_on_at_its_next_index() -> None:
    side = engine()
    submission = ask(max_tokens=6)
    whole = right(submission)
    side.scheduler.submit(ask(max_tokens=6, output=tuple(whole[:2])), 0.0)
    (delta,) = step(side).tokens
    assert (delta.first_index, unpack(delta.tokens)) == (2, whole[2:3])
    assert finish(side) == {("a", 0): whole[3:]}
