"""What a step's plan takes of a frame: a prompt at most once, and never more than a rank would read."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from slow_cases import examples
from staged_engine import VOCABULARY, ask, engine, pack, right, unpack

from kvtransfer.codec import MAX_FRAME_BYTES
from workers.config import EngineConfig
from workers.errors import CapacityError
from workers.messages.link import SampleState, Submission
from workers.messages.rank_channel import RANK_DOWN_CODEC, StepPlan, StepReport
from workers.messages.sampling import SamplingParams
from workers.scheduler import step
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler

PENALTY = SamplingParams(temperature=0.7, repetition_penalty=1.1)


def scheduler(num_tokens: int, num_requests: int = 1, num_samples: int = 1) -> Scheduler:
    """A scheduler with capacity for so many prompts of this length."""
    config = EngineConfig(
        chunk_tokens=256, max_batch_tokens=256 * num_requests, max_sequences=num_requests * num_samples
    )
    return Scheduler(
        config,
        BlockPool(num_requests * (num_tokens // 64 + 2) + num_samples, 64),
        eos_token_ids=(),
        max_context_tokens=2 * num_tokens,
    )


def submission(prompt: bytes, sampling: SamplingParams, num_samples: int = 1, name: str = "a") -> Submission:
    samples = tuple(SampleState(index, index) for index in range(num_samples))
    return Submission(name, 1, "", "", 0, prompt, b"", (), samples, sampling, None, None)


def plan_of(side: Scheduler) -> StepPlan:
    plan = side.plan(0.0)
    assert plan is not None
    return plan


@pytest.mark.parametrize("num_tokens", [131_072, 262_144])
def test_a_long_prompt_with_many_samples_starts_in_a_small_plan(num_tokens: int) -> None:
    """Repeated for every sample it would be 33.6 and 67.1 MB, and a rank reads 64 MiB at most."""
    side = scheduler(num_tokens, num_samples=64)
    side.submit(submission(bytes(4 * num_tokens), SamplingParams(), 64), 0.0)
    frame = RANK_DOWN_CODEC.encode(plan_of(side))
    assert len(frame) < 32_000, "a table of blocks, a chunk and 64 starts"


def test_a_penalty_brings_the_prompt_once() -> None:
    num_tokens = 262_144
    prompt = b"".join(number.to_bytes(4, "little") for number in range(num_tokens))
    side = scheduler(num_tokens, num_samples=64)
    side.submit(submission(prompt, PENALTY, 64), 0.0)
    plan = plan_of(side)
    (start,) = plan.starts
    assert (start.prompt, len(start.samples)) == (prompt, 64)
    assert len(RANK_DOWN_CODEC.encode(plan)) < len(prompt) + 32_000


def test_penalties_on_the_output_alone_need_no_prompt() -> None:
    side = scheduler(4096)
    output = pack([5, 6, 5])
    sampling = SamplingParams(frequency_penalty=0.5)
    asked = replace(submission(bytes(4096), sampling), samples=(SampleState(0, 3, output),))
    side.submit(asked, 0.0)
    (start,) = plan_of(side).starts
    (sample,) = start.samples
    assert (start.prompt, sample.output, sample.num_output_tokens, sample.last_token) == (b"", output, 3, 5)


def test_long_prompts_with_penalties_are_spread_over_plans() -> None:
    """40 of them start as soon as they fit: 42 MB of prompts, which two plans share."""
    num_tokens, num_requests = 262_144, 40
    side = scheduler(num_tokens, num_requests)
    prompt = bytes(4 * num_tokens)
    for number in range(num_requests):
        side.submit(submission(prompt, PENALTY, name=f"r{number}"), 0.0)
    started: list[int] = []
    while sum(started) < num_requests:
        plan = plan_of(side)
        assert len(RANK_DOWN_CODEC.encode(plan)) <= step.PLAN_BYTES
        started.append(sum(len(start.samples) for start in plan.starts))
        side.settle(StepReport(plan.step, b"", 0.0, 0.0), 0.0)
    assert started == [31, 9]


def test_what_fits_no_plan_is_refused_by_name() -> None:
    num_tokens = 4_500_000
    side = scheduler(num_tokens)
    with pytest.raises(CapacityError, match=r"prompt: its 4500000 tokens .* without penalties"):
        side.submit(submission(bytes(4 * num_tokens), PENALTY), 0.0)
    side.submit(submission(bytes(4 * num_tokens), SamplingParams()), 0.0)
    assert len(RANK_DOWN_CODEC.encode(plan_of(side))) < 1 << 20


def decoding_frames(num_tokens: int, num_sequences: int, num_steps: int) -> list[int]:
    """The sizes of the plans of a batch that decodes behind prompts of so many tokens."""
    config = EngineConfig(chunk_tokens=1 << 20, max_batch_tokens=1 << 20, max_sequences=num_sequences)
    num_blocks = num_sequences * (num_tokens // 64 + 8)
    side = Scheduler(config, BlockPool(num_blocks, 64), eos_token_ids=(), max_context_tokens=1 << 20)
    for number in range(num_sequences):
        prompt = pack([number]) * num_tokens
        side.submit(submission(prompt, SamplingParams(max_tokens=999), name=f"r{number}"), 0.0)
    sizes: list[int] = []
    while len(sizes) < num_steps:
        plan = plan_of(side)
        if plan.decodes == pack(list(range(num_sequences))):
            sizes.append(len(RANK_DOWN_CODEC.encode(replace(plan, step=1))))
        side.settle(StepReport(plan.step, bytes(4 * len(plan.sample_slots)), 0.0, 0.0), 0.0)
    return sizes


def test_plans_of_a_decoding_batch_do_not_grow_with_context() -> None:
    """In one step all tables grow by a block: eight bytes each."""
    short, long = decoding_frames(1000, 8, 64), decoding_frames(100_008, 8, 64)
    (growth,) = [step for step, size in enumerate(short) if size > min(short)]
    assert max(long) == long[growth] == short[growth] == 54 + 8 * 8
    del short[growth], long[growth]
    assert short == long
    assert set(short) == {54}


requests = st.lists(
    st.tuples(
        st.integers(1, 20),  # tokens of the prompt
        st.integers(1, 3),  # samples
        st.integers(0, 3),  # priority
        st.booleans(),  # penalties
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=requests, num_blocks=st.integers(12, 60), num_bytes=st.integers(1150, 3000))
def test_no_plan_exceeds_its_bytes_and_everybody_is_served(
    monkeypatch: pytest.MonkeyPatch,
    requests: list[tuple[int, int, int, bool]],
    num_blocks: int,
    num_bytes: int,
) -> None:
    """With samples, preemption and a budget of a few starts: what waits for free blocks is computed later."""
    monkeypatch.setattr(step, "PLAN_BYTES", num_bytes)
    side = engine(num_blocks=num_blocks)
    asked = []
    for number, (num_tokens, num_samples, priority, has_penalties) in enumerate(requests):
        prompt = [(number * 7 + place) % VOCABULARY for place in range(num_tokens)]
        name = f"{number}{'a' if has_penalties else 'b'}"
        asked.append(ask(name, prompt, n=num_samples, max_tokens=6, priority=priority))
        if number % 2:
            sampling = replace(asked[-1].sampling, num_prompt_logprobs=2)
            asked[-1] = replace(asked[-1], sampling=sampling)
        side.scheduler.submit(asked[-1], 0.0)
    outputs: dict[tuple[str, int], list[int]] = {}
    while side.plan(0.0) or side.plans:
        if side.plans:
            plan = side.plans[-1]
            fixed = replace(plan, free_slots=(), copies=())
            assert len(RANK_DOWN_CODEC.encode(fixed)) <= num_bytes
        for delta in side.settle(0.0).tokens:
            outputs.setdefault((delta.request_id, delta.sample), []).extend(unpack(delta.tokens))
        side.check()
    assert outputs == {
        (it.request_id, index): right(it, index) for it in asked for index in range(len(it.samples))
    }


@settings(max_examples=examples(60), deadline=None)
@given(
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_k=st.integers(0, 2**40),
        min_p=st.floats(0, 1),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.2]),
        logit_bias=st.dictionaries(st.integers(0, 2**32), st.floats(-9, 9), max_size=40),
        stop_token_ids=st.lists(st.integers(0, 2**32), max_size=9).map(tuple),
        max_tokens=st.integers(1, 2**40),
        num_logprobs=st.none() | st.integers(0, 20),
        num_prompt_logprobs=st.none() | st.integers(0, 20),
    ),
    num_samples=st.integers(1, 20),
    num_tokens=st.integers(1, 3000),
    seed=st.integers(-(2**63), 2**64 - 1),
)
def test_the_bytes_that_are_counted_are_enough(
    sampling: SamplingParams, num_samples: int, num_tokens: int, seed: int
) -> None:
    """Over the codec itself: at least what the message takes, and without long lists not far above."""
    side = scheduler(num_tokens, num_samples=num_samples)
    samples = tuple(SampleState(index, seed) for index in range(num_samples))
    side.submit(replace(submission(bytes(4 * num_tokens), sampling), samples=samples), 0.0)
    made = step.StepBatch(1, 256)
    side._planner.fill(made, 0.0)
    plan = made.plan(())
    assert len(RANK_DOWN_CODEC.encode(plan)) <= step.PLAN_BYTES - made.budget_bytes
    assert step.PLAN_BYTES < MAX_FRAME_BYTES


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    num_top=st.integers(0, 3),
    num_bytes=st.integers(28, 200),
)
def test_no_report_has_more_log_probabilities_than_its_share_and_all_are_read(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], num_top: int, num_bytes: int
) -> None:
    """Chunks are cut where the report of their step would become too long."""
    monkeypatch.setattr(step, "LOGPROB_BYTES", num_bytes)
    side = engine(num_blocks=60)
    for number, num_tokens in enumerate(lengths):
        asked = ask(f"r{number}", [number + 1] * num_tokens, max_tokens=2)
        sampling = replace(asked.sampling, num_prompt_logprobs=num_top)
        side.scheduler.submit(replace(asked, sampling=sampling), 0.0)
    read: dict[str, int] = {}
    while side.plan(0.0) or side.plans:
        outcome = side.settle(0.0)
        assert sum(it.logprobs.num_bytes for it in outcome.prompt_logprobs) <= num_bytes
        for part in outcome.prompt_logprobs:
            assert part.first_index == read.get(part.request_id, 0) + 1
            read[part.request_id] = read.get(part.request_id, 0) + part.logprobs.num_tokens
        side.check()
    assert read == {f"r{number}": count - 1 for number, count in enumerate(lengths) if count > 1}
