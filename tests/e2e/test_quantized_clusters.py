"""Checkpoints with quantized weights through replicas of mixed shapes: handed over, found again, moved and
loaded from the store, a request has the tokens that the dequantized weights give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e_harness import (
    BLOCK_TOKENS,
    NUM_TOKENS,
    E2eHarness,
    add_with_store,
    move,
    prompt,
    started,
    stored_blocks,
    until,
)
from family_checkpoints import write_family_checkpoint
from paged_model import continued
from quantized_checkpoints import FORMATS, quantize
from slow_cases import slow_but
from store_harness import StoreHarness

from workers.config import Parallel

PROMPT = prompt(5)
NUM_FULL_BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
TWO_STAGES = Parallel(pp=2, devices=("cpu", "cpu"), layers=(2, 2))
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 251,
}
MODELS: dict[str, dict[str, Any]] = {
    "awq": {"family": "llama", "tie_word_embeddings": True},
    "int8": {"family": "qwen3"},
    "fp8 in blocks": {"family": "glm4"},
    "gptq": {"family": "mixtral", "num_local_experts": 4},
}


@pytest.mark.parametrize("how", slow_but(MODELS, "awq"))
async def test_tokens_are_those_of_dequantized_weights(how: str, tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path / "source", seed=7, **SHAPE | MODELS[how])
    plain = quantize(tmp_path / "source", tmp_path / "model", FORMATS[how], has_tables=True)
    expected = continued(plain, PROMPT, NUM_TOKENS)
    assert len(set(expected)) >= 10, "a stream that repeats itself shows little"
    harness = E2eHarness(tmp_path / "model")
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        await store.start()
        split = await harness.add("split", "prefill", parallel=Parallel(tp=2))
        whole = await add_with_store(harness, store, "whole", "decode")
        assert split.core.compatibility.weight_dtype != "float32"
        for name in ("first", "again"):
            submission = harness.submission(name, PROMPT, decode=whole, max_tokens=NUM_TOKENS)
            heard = await harness.run(split, submission)
            assert heard.failure is None, heard.failure
            assert heard.sequence() == expected
        await stored_blocks(whole, NUM_FULL_BLOCKS)
        moved = harness.submission("moved", PROMPT, max_tokens=NUM_TOKENS)
        stream = await started(harness, whole, moved, 10)
        move(moved, whole, split)
        await until(lambda: bool(stream.moves), "the move has ended")
        await harness.ended(moved)
        assert stream.sequence() == expected
        other = await add_with_store(harness, store, "other", parallel=TWO_STAGES)
        loaded = await harness.run(other, harness.submission("loaded", PROMPT, max_tokens=NUM_TOKENS))
        assert loaded.prefill is not None
        assert loaded.prefill.num_loaded_tokens == {"dram": NUM_FULL_BLOCKS * BLOCK_TOKENS}
        assert loaded.sequence() == expected
