"""A replica whose router sends most tokens to the experts of one rank: copies appear while it serves, and
then loads are even. Tokens stay those of one rank."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from e2e_harness import E2eHarness, Heard, fired, rule, until
from paged_model import tokens_of
from skewed_experts import NUM_LAYERS, write_skewed

from workers.config import Parallel

pytestmark = pytest.mark.slow

PROMPTS = [tokens_of(seed, length) for seed, length in enumerate((70, 33, 9, 54, 41, 18))]
NUM_TOKENS = 24


async def tokens_at(harness: E2eHarness, name: str, turn: int) -> list[list[int]]:
    """Return the tokens that a replica generates for all prompts at once, greedily."""
    replica = harness.replicas[name]
    submissions = [
        harness.submission(f"{name}-{turn}-{number}", prompt, max_tokens=NUM_TOKENS, temperature=0.0)
        for number, prompt in enumerate(PROMPTS)
    ]
    ended = await asyncio.gather(*(harness.run(replica, submission) for submission in submissions))
    assert all(heard.failure is None for heard in ended)
    return [heard.sequence() for heard in ended]


async def test_copies_of_hot_experts_appear_while_a_replica_serves(tmp_path: Path) -> None:
    write_skewed(tmp_path)
    async with E2eHarness(tmp_path) as harness:
        await harness.add("one")
        expected = await tokens_at(harness, "one", 0)
        split = await harness.add("split", parallel=Parallel(tp=2, ep=2), engine={"expert_copies": 2})
        core = split.core
        assert core.reports.load().num_expert_copies == 0, "nothing is known of the loads yet"
        for turn in range(2000):
            assert await tokens_at(harness, "split", turn) == expected
            load = core.reports.load()
            if load.num_expert_copies and load.expert_rank_imbalance < 1.25:
                break
        # Tokens from before the copies count as well.
        assert load.expert_rank_imbalance < 1.25 < 1.4 < load.expert_uncopied_imbalance
        assert load.num_expert_copies >= NUM_LAYERS
        await harness.quiet()


async def test_a_rank_that_dies_while_an_expert_is_copied_ends_the_replica(tmp_path: Path) -> None:
    """The other rank, which waits for it or sends to it, does not hang; requests resume elsewhere."""
    write_skewed(tmp_path)
    kill = rule("rank.step.copies", "kill", tmp_path)
    async with E2eHarness(tmp_path) as harness:
        await harness.add("one")
        expected = await tokens_at(harness, "one", 0)
        split = await harness.add(
            "split", parallel=Parallel(tp=2, ep=2), engine={"expert_copies": 2}, faults=[kill]
        )
        turn, heard = 0, Heard()
        while heard.failure is None:
            submission = harness.submission(
                f"split-{turn}", PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0.0
            )
            heard = await harness.run(split, submission)
            turn += 1
            assert turn < 2000, "no copies appear"
        assert fired(kill)
        assert heard.failure.code == "internal"
        await until(lambda: split.core._death != "", "the replica has ended")
        begun = heard.sequence()
        again = harness.submission("again", PROMPTS[0], output=begun, max_tokens=NUM_TOKENS, temperature=0.0)
        second = await harness.run(harness.replicas["one"], again)
        assert begun + [second.tokens[0][it] for it in sorted(second.tokens[0])] == expected[0]
