"""Latents between replicas of one, two and four ranks: each block crosses the wire once, whatever the number
of ranks that hold it, and all of them decode with it."""

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

pytestmark = pytest.mark.slow  # ten ranks and a reference

PROMPT = prompt(5)
NUM_BLOCKS = -(-len(PROMPT) // BLOCK_TOKENS)
NUM_FULL_BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
# Of fewer layers than ranks, so that some rank receives nothing.
SHAPE = CASES["deepseek_v2-1"] | {"num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 251}


def block_bytes(replica: Replica) -> int:
    return BLOCK_TOKENS * replica.core.compatibility.token_bytes


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
    assert heard.hand_over.num_moved_bytes == NUM_BLOCKS * block_bytes(target)


async def test_latents_cross_the_wire_once_to_any_number_of_ranks(tmp_path: Path) -> None:
    """By hand-overs and a migration; and what was given on is stored and loaded as any other."""
    write_family_checkpoint(tmp_path / "model", seed=7, **SHAPE)
    expected = continued(tmp_path / "model", PROMPT, NUM_TOKENS)
    assert len(set(expected)) >= 15, "a stream that repeats itself shows little"
    harness = E2eHarness(tmp_path / "model")
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        await store.start()
        one = await harness.add("one", "prefill")
        two = await harness.add("two", "prefill", parallel=Parallel(tp=2))
        four = await add_with_store(harness, store, "four", "decode", parallel=Parallel(tp=4))
        pair = await harness.add("pair", "decode", parallel=Parallel(tp=2))
        assert one.core.compatibility.token_bytes == 3 * SHAPE["kv_lora_rank"] * 4 + 3 * 6 * 4
        await hand_over(harness, "one-four", one, four, expected)
        await stored_blocks(four, NUM_FULL_BLOCKS)
        await hand_over(harness, "two-pair", two, pair, expected)
        submission = harness.submission("moved", PROMPT, max_tokens=NUM_TOKENS)
        heard = await started(harness, one, submission, 25)
        move(submission, one, pair)
        await until(lambda: bool(heard.moves), "the move has ended")
        await harness.ended(submission)
        assert [ended.error for ended in heard.moves] == [""]
        assert heard.sequence() == expected
        single = await add_with_store(harness, store, "single")
        loaded = await harness.run(single, harness.submission("loaded", PROMPT, max_tokens=NUM_TOKENS))
        assert loaded.prefill is not None
        assert loaded.prefill.num_loaded_tokens == {"dram": NUM_FULL_BLOCKS * BLOCK_TOKENS}
        assert loaded.sequence() == expected
        await harness.quiet()
