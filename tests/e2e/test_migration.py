"""Streams that move between decode replicas while they run: the same tokens, nothing computed twice."""

from __future__ import annotations

from typing import Any

import pytest
from e2e_harness import BLOCK_TOKENS, NUM_TOKENS, E2eHarness, move, moved_and_right, prompt, started, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLINGS: list[dict[str, Any]] = [
    {"num_logprobs": 2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 11},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "num_logprobs": 1, "seed": 12},
    {"temperature": 1.2, "frequency_penalty": 0.7, "logit_bias": {5: 2.0}, "min_p": 0.05, "seed": 13},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_moved_stream_has_the_tokens_of_one_that_stays(
    shared_harness: E2eHarness, sampling: dict[str, Any]
) -> None:
    harness, at, number = shared_harness, shared_harness.replicas, SAMPLINGS.index(sampling)
    submission = harness.submission(f"move{number}", prompt(number), max_tokens=NUM_TOKENS, **sampling)
    heard = await started(harness, at["d0"], submission)
    num_before = at["d0"].core.migration.num_migrated
    move(submission, at["d0"], at["b0"])
    await moved_and_right(harness, heard, submission)
    assert at["d0"].core.migration.num_migrated == num_before + 1
    assert heard.hand_over is not None
    first = heard.hand_over.first_index
    assert 5 <= first < NUM_TOKENS
    assert heard.hand_over.num_moved_bytes > 0
    await harness.quiet()


async def test_a_stream_that_was_handed_over_moves_on_and_back(shared_harness: E2eHarness) -> None:
    """From a prefill replica to a decode replica, on to another, back, and to the prefill replica."""
    harness, at = shared_harness, shared_harness.replicas
    submission = harness.submission("tour", prompt(10), decode=at["d0"], max_tokens=1400, temperature=1.0)
    heard = await started(harness, at["p0"], submission)
    for number, (source, target) in enumerate([("d0", "b0"), ("b0", "d0"), ("d0", "p0")], 1):
        move(submission, at[source], at[target])
        await until(lambda number=number: len(heard.moves) == number, f"move {number}")  # type: ignore[misc]
    await moved_and_right(harness, heard, submission, num_moves=3)
    await harness.quiet()


async def test_what_the_target_holds_is_not_sent(shared_harness: E2eHarness) -> None:
    harness, at = shared_harness, shared_harness.replicas
    await harness.run(at["b0"], harness.submission("before", prompt(20)))
    submission = harness.submission("held", prompt(20), max_tokens=NUM_TOKENS)
    heard = await started(harness, at["d0"], submission)
    move(submission, at["d0"], at["b0"])
    await moved_and_right(harness, heard, submission)
    assert heard.hand_over is not None
    assert heard.hand_over.num_held_tokens >= 96
    token_bytes = at["d0"].core.compatibility.token_bytes
    num_moved_tokens = heard.hand_over.num_moved_bytes // token_bytes
    assert num_moved_tokens <= 4 + heard.hand_over.first_index + BLOCK_TOKENS
    await harness.quiet()
