"""Chunks beside decodes: the objective for output tokens is kept wherever a chunk can keep it."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_costs import LinearCosts, Prices
from slow_cases import examples
from staged_engine import BLOCK_TOKENS, StagedEngine, ask, engine, finish, plan, right, step

from workers.messages.rank_channel import StepPlan
from workers.scheduler.chunk_sizes import ChunkSizes
from workers.scheduler.step import StepBatch
from workers.scheduler.step_costs import StepCosts

# A chunk's token takes as long as eight sequences that decode.
PRICES = Prices(base_s=1.0, sequence_s=0.125, context_s=0.0, token_s=1.0, attention_s=0.0)


def batch_of(num_decodes: int, context: int) -> StepBatch:
    """Return a batch in which so many sequences decode, each behind `context` tokens."""
    batch = StepBatch(1, 1 << 20)
    batch.decodes = [None] * num_decodes  # type: ignore[list-item]
    batch.decode_starts = [context] * num_decodes
    batch.delays_decodes = num_decodes > 0
    return batch


@settings(max_examples=examples(200), deadline=None)
@given(
    objective_s=st.floats(1e-3, 1.0),
    num_decodes=st.integers(1, 256),
    context=st.integers(0, 1 << 15),
    start=st.integers(0, 1 << 17),
    most=st.integers(2, 4096),
    num_stages=st.integers(1, 4),
    block_tokens=st.sampled_from([16, 64, 256]),
)
def test_the_longest_chunk_that_keeps_the_objective(
    objective_s: float,
    num_decodes: int,
    context: int,
    start: int,
    most: int,
    num_stages: int,
    block_tokens: int,
) -> None:
    costs = LinearCosts(Prices())
    sizes = ChunkSizes(objective_s, costs, num_stages, block_tokens)
    batch = batch_of(num_decodes, context)
    size = sizes.most_tokens(batch, start, most)

    def step_s(num_tokens: int) -> float:
        attended = num_tokens * (start + num_tokens / 2)
        context_tokens = num_decodes * context
        return costs.step_s(num_decodes, context_tokens, num_tokens, attended, num_stages=num_stages)

    least = min(block_tokens, most)
    longest = bisect_right(range(1, most + 1), objective_s, key=step_s)
    assert least <= size <= most, "every step with a prompt progresses by a block"
    if longest >= least:
        assert step_s(size) <= objective_s
        assert size > longest - block_tokens, "longer chunks would keep it, too"
        assert size in (longest, least) or (start + size) % block_tokens == 0
    else:
        assert size == least or step_s(size) <= step_s(0) / 0.75


@pytest.mark.parametrize("objective_s", [None, 5.0])
def test_nothing_is_limited_without_an_objective_or_decodes_or_costs(objective_s: float | None) -> None:
    known, unknown = LinearCosts(PRICES), StepCosts()
    busy, idle = batch_of(8, 0), batch_of(0, 0)
    assert ChunkSizes(objective_s, known, 1, 4).most_tokens(idle, 0, 100) == 100
    assert ChunkSizes(objective_s, unknown, 1, 4).most_tokens(busy, 0, 100) == 100
    assert ChunkSizes(None, known, 1, 4).most_tokens(busy, 0, 100) == 100
    assert ChunkSizes(5.0, known, 1, 4).most_tokens(busy, 0, 100) == 4, "3 tokens keep it, a block is least"


def busy_engine() -> StagedEngine:
    """Return an engine in which one sequence decodes."""
    costs = LinearCosts(PRICES)
    side = engine(costs=costs, max_batch_tokens=32, chunk_tokens=32, tpot_objective_s=10.0)
    side.scheduler.submit(ask("a", [1, 2], max_tokens=30), 0.0)
    step(side)
    return side


def chunk_tokens(planned: StepPlan) -> list[int]:
    return [entry.num_tokens for entry in planned.entries]


def test_chunks_are_as_long_as_the_objective_lets_them_be() -> None:
    side = busy_engine()
    side.scheduler.submit(ask("b", list(range(1, 21))), 0.0)
    sizes = []
    for _ in range(3):
        sizes.append(chunk_tokens(plan(side)))
        side.settle(0.0)
    # A step has time for 8 tokens beside the base and the decode.
    assert sizes == [[8], [8], [4]]


def test_a_prompt_that_finds_no_time_waits_with_nothing_taken() -> None:
    side = busy_engine()
    side.scheduler.submit(ask("b", list(range(1, 17))), 0.0)
    side.scheduler.submit(ask("c", [5] * 12), 0.0)
    assert chunk_tokens(plan(side)) == [8]
    assert [it.request.key[0] for it in side.scheduler.life.waiting] == ["c"]
    side.settle(0.0)
    assert chunk_tokens(plan(side)) == [8]
    side.settle(0.0)
    assert [it.request.key[0] for it in side.scheduler.life.waiting] == ["c"]
    assert chunk_tokens(plan(side)) == [8], "its turn comes when the prompt before it is done"


def test_an_objective_that_cannot_be_kept_leaves_prompts_a_quarter_of_the_step() -> None:
    prices = Prices(base_s=30.0, sequence_s=0.0, context_s=0.0, token_s=1.0, attention_s=0.0)
    sizes = ChunkSizes(5.0, LinearCosts(prices), 1, 4)
    assert sizes.most_tokens(batch_of(1, 0), 0, 100) == 8, "10 tokens beside 30 s, in whole blocks"


@settings(max_examples=examples(40), deadline=None)
@given(
    objective_s=st.floats(0.5, 40.0),
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    num_stages=st.integers(1, 3),
)
def test_every_prompt_ends_with_the_tokens_that_it_gets_alone(
    objective_s: float, prompts: list[int], num_stages: int
) -> None:
    side = engine(
        200, num_stages, costs=LinearCosts(PRICES), max_batch_tokens=32, chunk_tokens=32,
        tpot_objective_s=objective_s,
    )  # fmt: skip
    asked = [ask("first", [1, 2], max_tokens=9)]
    asked += [ask(f"p{index}", [1 + index] * size) for index, size in enumerate(prompts)]
    for submission in asked:
        side.scheduler.submit(submission, 0.0)
    outputs = finish(side)
    assert outputs == {(it.request_id, 0): right(it) for it in asked}
    most_steps = sum(-(-size // BLOCK_TOKENS) for size in prompts) + sum(
        it.sampling.max_tokens for it in asked
    )
    assert side.step <= num_stages * most_steps + len(prompts), "prompts starve"
