"""Models whose layers with a window have KV apart, through a cluster of mixed shapes: what `transformers`
generates, and no more KV than windows need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e_harness import (
    BLOCK_TOKENS,
    E2eHarness,
    Heard,
    Replica,
    add_with_store,
    move,
    prompt,
    started,
    stored_blocks,
    until,
)
from family_checkpoints import GEMMA4_SHAPE, write_family_checkpoint
from paged_model import continued
from store_harness import StoreHarness

from kvtransfer.blocks.group_prefix import first_needed_block
from workers.config import Parallel

pytestmark = pytest.mark.slow  # five ranks, and a reference for each model

WINDOW = 20
NUM_TOKENS = 90
PROMPT = prompt(5)
# As long, and the same up to the middle of a block.
OTHER = [*PROMPT[:70], *prompt(6)[:30]]
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 101,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 251,
    "pad_token_id": 0,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {},
    "gemma4_text": GEMMA4_SHAPE | {"sliding_window": WINDOW},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2},
}
# Of two stages, the first has no layer without a window. Layers that share KV are of one stage.
TWO_STAGES = Parallel(pp=2, devices=("cpu", "cpu"), layers=(1, 2))


class WindowCluster:
    """A prefill replica of two ranks, a decode replica of two stages, and one of one rank."""

    def __init__(self, harness: E2eHarness, model_dir: Path) -> None:
        self._harness = harness
        self._model_dir = model_dir
        self.prefill: Replica
        self.decode: Replica
        self.single: Replica

    async def start(self, two_stages: Parallel, store: StoreHarness | None = None) -> None:
        how: dict[str, Any] = {"frees_windows": True, "store": None if store is None else store.settings.name}
        add = self._harness.add
        self.prefill = await add("p", "prefill", parallel=Parallel(tp=2), **how)
        self.decode = await add("d", "decode", parallel=two_stages, **how)
        self.single = await add("s", **how)
        for replica in (self.prefill, self.decode, self.single):
            assert [pool.window for pool in replica.core.group_pools] == [WINDOW]

    async def check_hand_over(self, name: str, tokens: list[int], num_held_tokens: int) -> None:
        """Every block of layers without a window crosses once, and of the others those of the window."""
        heard = await self._run(self.prefill, name, tokens, decode=self.decode)
        assert heard.hand_over is not None
        assert heard.hand_over.num_held_tokens == num_held_tokens
        compatibility = self.single.core.ready[0].compatibility
        full, windowed = compatibility.groups
        layer_bytes = 2 * compatibility.num_kv_heads * compatibility.head_dim * 4 * BLOCK_TOKENS
        num_blocks, first = -(-len(tokens) // BLOCK_TOKENS), num_held_tokens // BLOCK_TOKENS
        first_of_window = max(first, first_needed_block(len(tokens), WINDOW, BLOCK_TOKENS))
        num_moved = len(full.layers) * (num_blocks - first)
        num_moved += len(windowed.layers) * (num_blocks - first_of_window)
        assert heard.hand_over.num_moved_bytes == num_moved * layer_bytes

    async def check_resumption(self, num_before: int) -> None:
        """Elsewhere, after so many tokens."""
        expected = continued(self._model_dir, PROMPT, NUM_TOKENS)
        submission = self._harness.submission(
            "resumed", PROMPT, decode=self.decode, attempt=1, output=expected[:num_before],
            max_tokens=NUM_TOKENS,
        )  # fmt: skip
        heard = await self._harness.run(self.prefill, submission)
        assert heard.failure is None, heard.failure
        got = [heard.tokens[0][index] for index in range(num_before, NUM_TOKENS)]
        assert got == expected[num_before:]

    async def check_migration(self, num_before: int) -> None:
        """After at least so many tokens."""
        submission = self._harness.submission("moved", PROMPT, max_tokens=NUM_TOKENS)
        heard = await started(self._harness, self.decode, submission, num_before)
        move(submission, self.decode, self.single)
        await until(lambda: bool(heard.moves), "the move has ended")
        await self._harness.ended(submission)
        assert [ended.error for ended in heard.moves] == [""]
        assert heard.sequence() == continued(self._model_dir, PROMPT, NUM_TOKENS)

    async def check_store(self, store: StoreHarness) -> None:
        """What two ranks have stored, one loads, also up to where its prompt leaves the other: of windows
        what is needed behind that."""
        await stored_blocks(self.prefill, (len(PROMPT) - 1) // BLOCK_TOKENS)
        for name, tokens, num_blocks in (("left", OTHER, 4), ("whole", PROMPT, 6)):
            # One that has not measured yet whether a load is worth it.
            loader = await add_with_store(self._harness, store, name, frees_windows=True)
            heard = await self._run(loader, f"{name} by {name}", tokens)
            assert heard.prefill is not None
            assert heard.prefill.num_loaded_tokens == {"dram": num_blocks * BLOCK_TOKENS}

    async def check_samples(self) -> None:
        """Greedy ones, which are alike."""
        submission = self._harness.submission(
            "three", PROMPT, num_samples=3, max_tokens=40, decode=self.decode
        )
        heard = await self._harness.run(self.prefill, submission)
        assert heard.failure is None, heard.failure
        expected = continued(self._model_dir, PROMPT, 40)
        assert [heard.sequence(sample) for sample in range(3)] == [expected] * 3

    async def _run(self, at: Replica, name: str, tokens: list[int], **how: Any) -> Heard:
        submission = self._harness.submission(name, tokens, max_tokens=NUM_TOKENS, **how)
        heard = await self._harness.run(at, submission)
        assert heard.failure is None, heard.failure
        assert heard.sequence() == continued(self._model_dir, tokens, NUM_TOKENS)
        return heard

    def check_freed(self) -> None:
        """Nothing is used when nothing runs."""
        for replica in (self.prefill, self.decode, self.single):
            assert not any(pool.num_references for pool in replica.core.group_pools)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_window_is_all_that_moves(family: str, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_family_checkpoint(model_dir, family, seed=7, **(SHAPE | FAMILIES[family]))
    harness = E2eHarness(model_dir)
    async with harness:
        cluster = WindowCluster(harness, model_dir)
        await cluster.start(Parallel() if family == "gemma4_text" else TWO_STAGES)
        await cluster.check_hand_over("first", PROMPT, 0)
        await cluster.check_hand_over("again", PROMPT, 96)
        await cluster.check_hand_over("other", OTHER, 64)
        await cluster.check_resumption(40)
        await cluster.check_migration(25)
        await cluster.check_samples()
        await harness.quiet()
        cluster.check_freed()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_store_has_what_windows_need_behind_every_block(family: str, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_family_checkpoint(model_dir, family, seed=7, **(SHAPE | FAMILIES[family]))
    harness = E2eHarness(model_dir)
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        cluster = WindowCluster(harness, model_dir)
        await store.start()
        await cluster.start(Parallel() if family == "gemma4_text" else TWO_STAGES, store)
        await cluster.check_hand_over("first", PROMPT, 0)
        await cluster.check_store(store)
        await cluster.check_hand_over("again", PROMPT, 96)
        await harness.quiet()
        cluster.check_freed()
