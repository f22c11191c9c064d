"""One request through two replicas: the same tokens as through one, moved once, checked, and freed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from e2e_harness import BLOCK_TOKENS, E2eHarness, Heard, until
from optional_programs import uses_compiler

from workers.messages.link import Cancel

pytestmark = [pytest.mark.asyncio(loop_scope="module"), uses_compiler]


def prompt(seed: int, num_tokens: int = 100) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 190) for _ in range(num_tokens)]


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 11},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 12},
    {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.7, "logit_bias": {5: 2.0}, "seed": 13},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_disaggregated_tokens_equal_those_of_one_engine(
    shared_harness: E2eHarness, sampling: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    harness, name = shared_harness, request.node.name
    at = harness.replicas
    tokens = prompt(SAMPLINGS.index(sampling))
    alone = await harness.run(at["b0"], harness.submission(f"{name}-a", tokens, max_tokens=24, **sampling))
    split = harness.submission(f"{name}-s", tokens, decode=at["d0"], max_tokens=24, **sampling)
    moved = await harness.run(at["p0"], split)
    assert moved.failure is None
    assert moved.sequence() == alone.sequence()
    assert len(moved.sequence()) == 24
    assert moved.hand_over is not None
    assert moved.hand_over.num_bad_pieces == 0
    await harness.quiet()


async def test_only_what_the_decode_side_lacks_is_moved(shared_harness: E2eHarness) -> None:
    harness, at = shared_harness, shared_harness.replicas
    tokens = prompt(20)
    for name in ("first", "second"):
        await harness.run(at["p0"], harness.submission(name, tokens, decode=at["d0"]))
    first, second = harness.heard["first", 0], harness.heard["second", 0]
    assert first.prefill is not None
    assert second.prefill is not None
    assert first.hand_over is not None
    assert second.hand_over is not None
    assert (first.prefill.num_cached_tokens, first.hand_over.num_held_tokens) == (0, 0)
    assert second.prefill.num_cached_tokens == 96, "the prefill side reuses its own blocks"
    assert second.hand_over.num_held_tokens == 96, "the decode side pins what it holds"
    assert second.hand_over.num_moved_bytes * 7 == first.hand_over.num_moved_bytes
    assert first.sequence() == second.sequence()
    await harness.quiet()
    stored = sum(len(item.keys) for event in at["d0"].events for item in event.stored)
    assert stored >= len(tokens) // BLOCK_TOKENS


async def test_the_first_chunk_lands_before_the_last_is_computed(shared_harness: E2eHarness) -> None:
    harness, at = shared_harness, shared_harness.replicas
    tokens = prompt(21, 400)
    heard = await harness.run(at["p0"], harness.submission("long", tokens, decode=at["d0"]))
    assert heard.prefill is not None
    moments = heard.prefill.trace
    last_chunk_start = max(at for name, at in moments if name == "chunk.start")
    first_push_end = min(at for name, at in moments if name == "push.end")
    assert sum(name == "chunk.start" for name, _ in moments) == 13
    assert first_push_end < last_chunk_start


async def test_samples_share_the_prompt_and_fork_after_the_move(shared_harness: E2eHarness) -> None:
    harness, at = shared_harness, shared_harness.replicas
    tokens = prompt(22, 70)
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20}
    group = harness.submission("group", tokens, decode=at["d0"], num_samples=3, seed=40, **sampling)
    together = await harness.run(at["p0"], group)
    assert together.prefill is not None
    for index in range(3):
        single = harness.submission(f"single{index}", tokens, seed=40 + index, **sampling)
        alone = await harness.run(at["b0"], single)
        assert together.sequence(index) == alone.sequence()
    await harness.quiet()


async def test_a_request_that_ends_with_its_first_token_is_not_handed_over(
    shared_harness: E2eHarness,
) -> None:
    harness, at = shared_harness, shared_harness.replicas
    heard = await harness.run(at["p0"], harness.submission("one", prompt(23), decode=at["d0"], max_tokens=1))
    assert (len(heard.sequence()), heard.finish[0], heard.hand_over) == (1, "length", None)
    await harness.quiet()


async def test_many_at_once_get_their_own_tokens(shared_harness: E2eHarness) -> None:
    harness, at = shared_harness, shared_harness.replicas
    shared = prompt(24, 48)
    prompts = [shared + prompt(100 + i, 5 + 9 * i) for i in range(16)]
    split = [
        harness.submission(f"m{i}", tokens, decode=at["d0"], temperature=float(i % 2), seed=i, max_tokens=12)
        for i, tokens in enumerate(prompts)
    ]
    await asyncio.gather(*(harness.run(at["p0"], item) for item in split))
    for i, tokens in enumerate(prompts):
        single = harness.submission(f"n{i}", tokens, temperature=float(i % 2), seed=i, max_tokens=12)
        alone = await harness.run(at["b0"], single)
        assert harness.heard[f"m{i}", 0].sequence() == alone.sequence()
    await harness.quiet()


async def test_a_resumed_request_continues_with_the_same_tokens(shared_harness: E2eHarness) -> None:
    harness, at = shared_harness, shared_harness.replicas
    tokens = prompt(25)
    sampling: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.2, "max_tokens": 30, "seed": 5}
    whole = (await harness.run(at["b0"], harness.submission("whole", tokens, **sampling))).sequence()
    for cut in (1, 7, 29):
        resumed = harness.submission(
            f"cut{cut}", tokens, decode=at["d0"], attempt=1, output=whole[:cut], **sampling
        )
        heard = await harness.run(at["p0"], resumed)
        assert heard.failure is None, heard.failure
        continued = [heard.tokens[0][index] for index in sorted(heard.tokens[0])]
        assert sorted(heard.tokens[0])[0] == cut
        assert whole[:cut] + continued == whole
    await harness.quiet()


@pytest.mark.parametrize("num_heard", [0, 1, 2, 9])
async def test_a_cancel_at_any_stage_frees_everything(shared_harness: E2eHarness, num_heard: int) -> None:
    harness, at = shared_harness, shared_harness.replicas
    wanted = harness.submission(f"c{num_heard}", prompt(30 + num_heard, 200), decode=at["d0"], max_tokens=400)
    at["p0"].send(wanted)
    heard = harness.heard.setdefault((wanted.request_id, 0), Heard())
    await until(lambda: len(heard.tokens.get(0, {})) >= num_heard, f"{num_heard} tokens")
    for replica in (at["p0"], at["d0"]):
        replica.send(Cancel(wanted.request_id, 0))
    await harness.quiet()
    assert not heard.finish


async def test_a_deadline_ends_the_request_at_the_replica(shared_harness: E2eHarness) -> None:
    harness, at = shared_harness, shared_harness.replicas
    late = harness.submission("late", prompt(40), max_tokens=1500, deadline_s=0.5)
    heard = await harness.run(at["b0"], late)
    assert heard.failure is not None
    assert heard.failure.code == "deadline"
    await harness.quiet()


async def test_what_can_never_fit_is_refused_with_numbers(shared_harness: E2eHarness) -> None:
    harness, at = shared_harness, shared_harness.replicas
    heard = await harness.run(at["b0"], harness.submission("huge", prompt(41, 3000)))
    assert heard.failure is not None
    assert heard.failure.code == "invalid"
    assert "3000" in heard.failure.reason
