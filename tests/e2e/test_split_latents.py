"""Latents that ranks divide by tokens, between replicas of other divisions: hand-overs, a migration, the
store, and prefixes that are cached; each block crosses the wire once."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import (
    BLOCK_TOKENS,
    NUM_TOKENS,
    E2eHarness,
    Replica,
    add_with_store,
    move,
    prompt,
    started,
    stored_blocks,
    until,
)
from family_checkpoints import CASES, write_family_checkpoint
from paged_model import continued
from store_harness import StoreHarness

from workers.config import Parallel

PROMPT = prompt(5)
NUM_BLOCKS = -(-len(PROMPT) // BLOCK_TOKENS)
NUM_FULL_BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
SHAPE = CASES["deepseek_v2-1"] | {"num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 251}
SPLIT = {"latent_kv": "split"}


async def hand_over(
    harness: E2eHarness, name: str, source: Replica, target: Replica, expected: list[int]
) -> None:
    """Compute a prompt at one replica, and decode it at another."""
    submission = harness.submission(name, PROMPT, decode=target, max_tokens=NUM_TOKENS)
    heard = await harness.run(source, submission)
    assert heard.failure is None, heard.failure
    assert heard.sequence() == expected
    assert heard.hand_over is not None
    assert heard.hand_over.num_bad_pieces == 0
    num_bytes = NUM_BLOCKS * BLOCK_TOKENS * target.core.compatibility.token_bytes
    assert heard.hand_over.num_moved_bytes == num_bytes


async def moved(harness: E2eHarness, source: Replica, target: Replica, expected: list[int]) -> None:
    """Begin a stream at one replica, and end it at another."""
    name = f"moved to {target.core.identity.replica_id}"
    submission = harness.submission(name, PROMPT, max_tokens=NUM_TOKENS)
    heard = await started(harness, source, submission, 25)
    move(submission, source, target)
    await until(lambda: bool(heard.moves), "the move has ended")
    await harness.ended(submission)
    assert [ended.error for ended in heard.moves] == [""]
    assert heard.sequence() == expected


async def test_one_replica_of_two_ranks_computes_and_decodes(tmp_path: Path) -> None:
    """Also behind a prefix that it has cached."""
    write_family_checkpoint(tmp_path / "model", seed=7, **SHAPE)
    expected = continued(tmp_path / "model", PROMPT, NUM_TOKENS)
    harness = E2eHarness(tmp_path / "model")
    async with harness:
        replica = await harness.add("pair", parallel=Parallel(tp=2), engine=SPLIT)
        for name in ("first", "second"):
            heard = await harness.run(replica, harness.submission(name, PROMPT, max_tokens=NUM_TOKENS))
            assert heard.sequence() == expected
        assert heard.prefill is not None
        assert heard.prefill.num_cached_tokens == NUM_FULL_BLOCKS * BLOCK_TOKENS
        await harness.quiet()


@pytest.mark.slow  # eleven ranks and a reference
async def test_divided_latents_go_to_any_other_division(tmp_path: Path) -> None:
    """By hand-overs and a migration; and what is stored by divided ranks is loaded by others, and back."""
    write_family_checkpoint(tmp_path / "model", seed=7, **SHAPE)
    expected = continued(tmp_path / "model", PROMPT, NUM_TOKENS)
    assert len(set(expected)) >= 15, "a stream that repeats itself shows little"
    harness = E2eHarness(tmp_path / "model")
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        await store.start()
        one = await harness.add("one", "prefill")
        two = await harness.add("two", "prefill", parallel=Parallel(tp=2), engine=SPLIT)
        four = await add_with_store(harness, store, "four", "decode", parallel=Parallel(tp=4), engine=SPLIT)
        copies = await harness.add("copies", "decode", parallel=Parallel(tp=2))
        await hand_over(harness, "one-four", one, four, expected)
        await stored_blocks(four, NUM_FULL_BLOCKS)
        await hand_over(harness, "two-copies", two, copies, expected)
        for source, target in ((two, copies), (copies, four)):
            await moved(harness, source, target, expected)
        single = await add_with_store(harness, store, "single")
        pair = await add_with_store(harness, store, "pair", parallel=Parallel(tp=2), engine=SPLIT)
        for replica in (single, pair):
            name = f"loaded {replica.core.identity.replica_id}"
            loaded = await harness.run(replica, harness.submission(name, PROMPT, max_tokens=NUM_TOKENS))
            assert loaded.prefill is not None
            assert loaded.prefill.num_loaded_tokens == {"dram": NUM_FULL_BLOCKS * BLOCK_TOKENS}
            assert loaded.sequence() == expected
        await harness.quiet()
