"""A replica of 2x2 ranks gives what `transformers` generates, for sizes that two ranks cannot halve."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import E2eHarness
from family_checkpoints import GEMMA4_SHAPE
from paged_model import continued

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.config import Parallel

VOCABULARY = 251
NUM_TOKENS = 64
UNEVEN: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 96,
    "intermediate_size": 101,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 3,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen3": {"family": "qwen3", "tie_word_embeddings": True},
    "qwen2": {"family": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "mistral": {"family": "mistral", "sliding_window": 24, "num_key_value_heads": 1},
    "granite": {
        "family": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
        "attention_bias": True,
    },
    "phi3": {"family": "phi3", "pad_token_id": 0, "sliding_window": 20},
    "seed_oss": {"family": "seed_oss", "attention_bias": True},
    "cohere": {"family": "cohere", "logit_scale": 0.5, "use_qk_norm": True, "attention_bias": True},
    "cohere2": {"family": "cohere2", "logit_scale": 0.5, "sliding_window": 20, "sliding_window_pattern": 2},
    "stablelm": {"family": "stablelm", "use_qkv_bias": True},
    "stablelm-parallel": {"family": "stablelm", "use_parallel_residual": True, "qk_layernorm": True},
    # Its last two layers attend to the KV of the two before, and so are on the second of the stages.
    "gemma4": {"family": "gemma4_text", **GEMMA4_SHAPE},
    "latent": {
        "family": "deepseek_v3",
        "q_lora_rank": 29,
        "kv_lora_rank": 22,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 9,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 37,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "yarn": {
        "family": "llama",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
}
# A prompt of one token, one of one chunk, and one of several chunks.
LENGTHS = (1, 17, 90)


# One with biases, one with windows and one with parallel layers; the others are among the slow tests.
QUICK = ("llama", "mistral", "cohere")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS]
)
async def test_two_by_two_ranks_give_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    write_random_checkpoint(tmp_path, seed=11, **(UNEVEN | CHECKPOINTS[name]))
    draw = random.Random(name)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(count)] for count in LENGTHS]
    harness = E2eHarness(tmp_path)
    try:
        replica = await harness.add("2x2", parallel=Parallel(tp=2, pp=2, devices=("cpu", "cpu")))
        asked = [
            harness.submission(str(number), prompt, max_tokens=NUM_TOKENS)
            for number, prompt in enumerate(prompts)
        ]
        heard = await asyncio.gather(*(harness.run(replica, submission) for submission in asked))
        await harness.quiet()
    finally:
        await harness.close()
    assert [each.sequence() for each in heard] == [
        continued(tmp_path, prompt, NUM_TOKENS) for prompt in prompts
    ]
