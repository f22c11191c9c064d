"""What the scheduler promises of several stages: plans under way that do not wait for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_reader import PlanReader, Work
from staged_engine import (
    BLOCK_TOKENS,
    END,
    PROMPT,
    StagedEngine,
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
from workers.config import EngineConfig
from workers.messages.link import SampleState, Submission
from workers.messages.rank_channel import StepPlan, StepReport
from workers.messages.sampling import SamplingParams
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.micro_batches import MicroBatches
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import unpack_ids


def decoding(side: StagedEngine, num_sequences: int, max_tokens: int = 9) -> StagedEngine:
    """So many sequences have had their prompts, and nothing is out."""
    for index in range(num_sequences):
        side.scheduler.submit(ask(f"r{index}", [index + 1, 7], max_tokens=max_tokens), 0.0)
    while any(sequence.num_output_tokens == 0 for sequence in side.scheduler.life.running) or (
        side.scheduler.counts.num_waiting
    ):
        step(side)
    return side


def slots(plan: StepPlan) -> set[int]:
    return {*(entry.slot for entry in plan.entries), *unpack_ids(plan.decodes)}


@pytest.mark.parametrize(("num_stages", "num_sequences"), [(2, 4), (3, 3), (2, 2), (3, 6)])
def test_consecutive_plans_decode_different_sequences(num_stages: int, num_sequences: int) -> None:
    side = decoding(engine(num_stages=num_stages), num_sequences)
    out = [plan(side) for _ in range(num_stages + 1)]
    for first in range(2):  # any P plans in a row are disjoint and name everybody
        turns = [slots(each) for each in out[first : first + num_stages]]
        assert [len(turn) for turn in turns] == [num_sequences // num_stages] * num_stages
        assert len(set.union(*turns)) == num_sequences
    assert slots(out[-1]) == slots(out[0])
    assert {work.tokens for work in side.works(out[-1])} == {b""}, "the last stage has not run the first plan"


@pytest.mark.parametrize(("num_stages", "num_sequences"), [(2, 3), (3, 4), (3, 5), (4, 6)])
def test_an_uneven_number_is_spread_over_all_plans(num_stages: int, num_sequences: int) -> None:
    side = decoding(engine(num_stages=num_stages, max_sequences=8), num_sequences, max_tokens=12)
    sizes = [plan(side).num_sequences for _ in range(num_stages)]
    for _ in range(2 * num_stages):  # as the engine core does: a plan for a report
        side.settle(0.0)
        sizes.append(plan(side).num_sequences)
    assert {sum(sizes[at : at + num_stages]) for at in range(len(sizes) - num_stages + 1)} == {num_sequences}
    assert max(sizes) - min(sizes) == 1


def test_a_sequence_alone_waits_for_its_token() -> None:
    side = decoding(engine(num_stages=2), 1, max_tokens=4)
    plan(side)
    assert not side.plan(0.0), "the first stage would wait for the last, and a new prompt behind it"
    side.settle(0.0)
    assert plan(side).num_sequences == 1
    finish(side)


def test_sequences_that_have_no_slot_do_not_count() -> None:
    side = engine(num_stages=2, max_sequences=4)
    blocks = [side.pool.allocate(2) for _ in range(6)]
    for name, table in zip("abcdef", blocks, strict=True):
        submission = ask(name, decode="d", max_tokens=5)
        for position, token in enumerate(PROMPT):
            for stage in side.stages:
                stage.kv[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = token
        samples = (replace(submission.samples[0], output=right(submission)[0].to_bytes(4, "little")),)
        side.scheduler.adopt(replace(submission, samples=samples), table, len(PROMPT), 0.0)
    assert [plan(side).num_sequences for _ in range(2)] == [2, 2]
    outputs = finish(side)
    assert outputs == {(name, 0): right(ask(name, max_tokens=5))[1:] for name in "abcdef"}


def test_who_was_not_planned_longest_is_next_whatever_its_priority() -> None:
    side = engine(num_stages=2)
    for index in range(4):
        side.scheduler.submit(ask(f"r{index}", [index + 1], priority=index // 2, max_tokens=9), 0.0)
    for _ in range(5):
        step(side)  # nothing runs ahead: every token is known, and everybody could go
    counts = [sequence.num_output_tokens for sequence in side.scheduler.life.running]
    assert counts == [3, 3, 3, 3]


def test_chunks_of_a_prompt_follow_each_other_without_a_report() -> None:
    side = engine(num_stages=2, chunk_tokens=4)
    submission = ask(prompt=list(range(1, 13)))
    side.scheduler.submit(submission, 0.0)
    entries = [plan(side).entries[0] for _ in range(3)]
    assert [(entry.start, entry.num_tokens) for entry in entries] == [(0, 4), (4, 4), (8, 4)]
    assert not side.plan(0.0), "its first token is not known at the first stage"
    assert side.advance(0), "the first stage runs ahead of the second"
    assert side.advance(0)
    assert finish(side) == {("a", 0): right(submission)}


def test_a_stop_is_seen_after_the_next_plan_and_its_blocks_wait_for_it() -> None:
    side = engine(num_stages=2, num_blocks=12)
    stopping = next(
        [1, token] for token in range(1, 99) if alone([1, token], 7, 2, SamplingParams())[1:] == [END]
    )
    side.scheduler.submit(replace(ask("a", stopping), sampling=SamplingParams(max_tokens=9)), 0.0)
    side.scheduler.submit(ask("b", [2], max_tokens=9), 0.0)
    step(side)
    first, _, third = plan(side), plan(side), plan(side)
    (named,) = side.works(third)
    assert [work.slot for work in side.works(first)] == [named.slot]
    (delta,) = side.settle(0.0).tokens
    assert (unpack(delta.tokens), delta.finish) == ([END], "stop")
    side.settle(0.0)
    assert all(side.pool.is_referenced(block) for block in named.block_ids)
    assert named.slot not in plan(side).free_slots
    assert side.settle(0.0).tokens == []
    assert not any(side.pool.is_referenced(block) for block in named.block_ids)
    side.settle(0.0)
    assert plan(side).free_slots == (named.slot,)
    finish(side)


def test_blocks_that_an_unreported_plan_copies_from_stay_referenced() -> None:
    side = engine(num_stages=2)
    side.scheduler.submit(ask("a", n=2, max_tokens=4), 0.0)
    plan(side)
    side.scheduler.submit(ask("b", [3], max_tokens=1), 0.0)
    plan(side)
    copying = plan(side)
    (copy,) = copying.copies
    assert copying.num_sequences == 1, "whoever holds the block alone now is not named by the plan"
    side.settle(0.0)
    side.settle(0.0)
    side.scheduler.cancel("a", 1)
    assert side.pool.is_referenced(copy.src_block)
    side.check()
    side.settle(0.0)
    assert side.pool.num_referenced == 0


def test_landings_are_asked_for_what_all_stages_take_in() -> None:
    for num_stages, num_asked in ((1, 1), (2, 2), (3, 3)):
        side = engine(num_stages=num_stages, max_batch_tokens=8)
        for index in range(5):
            side.scheduler.submit(ask(f"r{index}", [index + 1] * 9, decode="d"), 0.0)
        assert len(side.scheduler.landings_wanted(0.0)) == num_asked


# ------------------------------------------------------------------------------------------ chunk lengths


def cost(start: int, num_tokens: int, ratio: float) -> float:
    """Products of the tokens, and the attention of each to what is before it."""
    return num_tokens + ratio * sum(start + index + 0.5 for index in range(num_tokens))


@given(
    num_stages=st.integers(2, 4),
    chunk_tokens=st.integers(1, 300),
    ratio=st.floats(0.0, 0.1),
    start=st.integers(0, 100_000),
)
def test_a_later_chunk_costs_what_the_first_did(
    num_stages: int, chunk_tokens: int, ratio: float, start: int
) -> None:
    num_tokens = MicroBatches(num_stages, chunk_tokens, 16, ratio).chunk_tokens(start)
    first = cost(0, chunk_tokens, ratio)
    assert min(16, chunk_tokens) <= num_tokens <= chunk_tokens
    if num_tokens > 16:
        assert cost(start, num_tokens, ratio) <= first * (1 + 1e-6)
    if num_tokens < chunk_tokens:
        assert cost(start, num_tokens + 1, ratio) > first * (1 - 1e-6)


def test_one_stage_has_chunks_of_one_length() -> None:
    assert MicroBatches(1, 256, 16, 0.01).chunk_tokens(5000) == 256


def test_chunks_shrink_behind_a_cached_prefix_and_an_own_one() -> None:
    side = engine(num_stages=2, ratio=0.5, chunk_tokens=8, max_batch_tokens=30)
    prompt = list(range(1, 24))
    side.scheduler.submit(ask("a", prompt, max_tokens=1), 0.0)
    sizes = []
    while side.plan(0.0):
        sizes.append(side.plans[-1].entries[0].num_tokens)
    assert sizes == [8, 4, 4, 4, 3]
    finish(side)
    side.scheduler.submit(ask("b", [*prompt[:16], *range(30, 38)], max_tokens=1), 0.0)
    assert [(entry.start, entry.num_tokens) for entry in plan(side).entries] == [(16, 4)]


def test_chunks_shrink_also_where_the_step_bounds_the_first() -> None:
    side = engine(num_stages=2, ratio=0.5, chunk_tokens=1000, max_batch_tokens=8)
    side.scheduler.submit(ask("a", list(range(1, 24)), max_tokens=1), 0.0)
    sizes = []
    while side.plan(0.0):
        sizes.append(side.plans[-1].entries[0].num_tokens)
    assert sizes == [8, 4, 4, 4, 3]


# ------------------------------------------------------------------------------------------- a timeline

Spans = list[tuple[float, float]]


def scheduler(num_stages: int, ratio: float, *prompts: tuple[int, int]) -> Scheduler:
    """With requests of (prompt tokens, output tokens)."""
    side = Scheduler(
        EngineConfig(block_tokens=16, chunk_tokens=128, max_batch_tokens=136, max_sequences=16),
        BlockPool(1000, 16),
        eos_token_ids=(),
        max_context_tokens=8000,
        num_stages=num_stages,
        attention_ratio=ratio,
    )
    for number, (num_tokens, max_tokens) in enumerate(prompts):
        prompt = pack([number, *range(1, num_tokens)])
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        keys = extend_keys(b"f", prompt, 16)
        sample = SampleState(0, number)
        submission = Submission(
            f"r{number}", 1, "", "", 0, prompt, b"f", keys, (sample,), sampling, None, None
        )
        side.submit(submission, 0.0)
    return side


def timeline(
    side: Scheduler, num_stages: int, cost: Callable[[list[Work]], float]
) -> list[tuple[list[Work], Spans]]:
    """When each stage computes each plan, until all is computed: each takes `cost`, and a report nothing. A
    plan that leaves tokens open begins when the last stage has sampled them."""
    done: list[tuple[list[Work], Spans]] = []
    reader = PlanReader()
    out: deque[tuple[StepPlan, list[Work], Spans]] = deque()
    free_at = [0.0] * num_stages
    slot_to_sampled_at: dict[int, float] = {}
    now = 0.0
    while True:
        while len(out) < num_stages + 1 and (plan := side.plan(now)) is not None:
            at = max([now, *(slot_to_sampled_at[slot] for slot in unpack_ids(plan.decodes))])
            works, spans = reader.read(plan), []
            for stage in range(num_stages):
                begin = max(at, free_at[stage])
                at = free_at[stage] = begin + cost(works)
                spans.append((begin, at))
            out.append((plan, works, spans))
            slot_to_sampled_at |= dict.fromkeys(plan.sample_slots, at)
        if not out:
            return done
        plan, works, spans = out.popleft()
        done.append((works, spans))
        now = spans[-1][1]
        tokens = pack([5] * len(plan.sample_slots))
        side.settle(StepReport(plan.step, tokens, 0.0, 0.0), now)


def overlap(done: list[tuple[list[Work], Spans]], start: float, end: float) -> float:
    """Share of a window in which all stages are busy."""
    starts_or_ends = [
        (min(max(at, start), end), change)
        for _, spans in done
        for span in spans
        for at, change in zip(span, (1, -1), strict=True)
    ]
    num_stages = len(done[0][1])
    total, num_busy, before = 0.0, 0, start
    for at, change in sorted(starts_or_ends):
        total += at - before if num_busy == num_stages else 0.0
        num_busy, before = num_busy + change, at
    return total / (end - start)


def plan_cost(ratio: float) -> Callable[[list[Work]], float]:
    return lambda works: 8.0 + sum(cost(work.start, work.num_tokens, ratio) for work in works)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_of_equal_cost_work_at_once_while_all_decode(num_stages: int) -> None:
    side = scheduler(num_stages, 0.0, *[(8, 60)] * 6)
    done = timeline(side, num_stages, plan_cost(0.0))
    first = next(spans for works, spans in done if all(work.num_tokens == 1 for work in works))
    last = done[-2 * num_stages][1]
    assert overlap(done, first[-1][1], last[0][0]) > 0.95


def test_stages_of_equal_cost_work_at_once_through_a_long_prompt() -> None:
    ratio = 0.002
    side = scheduler(2, ratio, *[(8, 150)] * 8, (4000, 1))
    done = timeline(side, 2, plan_cost(ratio))
    chunks = [(works, spans) for works, spans in done if any(work.start > 100 for work in works)]
    chunks = [(works, spans) for works, spans in chunks if any(work.num_tokens > 1 for work in works)]
    assert len(chunks) > 100
    assert overlap(done, chunks[0][1][0][0], chunks[-1][1][-1][1]) > 0.9
    costs = [spans[0][1] - spans[0][0] for _, spans in chunks[:-1]]
    assert max(costs) < 1.1 * min(costs)
