"""A model of each kind of layer through a cluster of mixed shapes: what `transformers` generates, through a
hand-over, a store, a resumption and a migration, beyond the windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e_harness import (
    BLOCK_TOKENS,
    NUM_TOKENS,
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

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.config import Parallel

pytestmark = pytest.mark.slow  # five ranks, a store, and a reference for each model

PROMPT = prompt(5)
NUM_FULL_BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
# Two ranks, and two stages, cannot halve these.
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 101,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 3,
    "vocab_size": 251,
    "pad_token_id": 0,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 20, "layer_types": KINDS},
    "gemma4_text": GEMMA4_SHAPE,
    "olmo3": {"sliding_window": 20, "layer_types": KINDS, "rope_theta": 500000.0},
    "glm4": {"attention_bias": True},
    "exaone4": {"sliding_window": 20, "layer_types": KINDS},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "apertus": {"hidden_act": "xielu"},
    "deepseek_v2": {
        "q_lora_rank": None,
        "kv_lora_rank": 22,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 9,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 37,
        "first_k_dense_replace": 1,
    },
    "phi3": {
        "sliding_window": 20,
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 2.0] * 4},
    },
}

_CHOSEN = {"num_experts_per_tok": 3, "moe_intermediate_size": 37}
# Families with experts, and how a prefill replica of two ranks splits them: each expert, or by their numbers.
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3_moe": (2, {**_CHOSEN, "num_experts": 7}),
    "glm4_moe": (2, {**_CHOSEN, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    "qwen2_moe": (1, {**_CHOSEN, "num_experts": 7, "shared_expert_intermediate_size": 51}),
    "mixtral": (2, {"num_local_experts": 5}),
    "minimax_m2": (1, {"num_local_experts": 7, "num_experts_per_tok": 3, "rotary_dim": 8}),
    "phimoe": (2, {"num_local_experts": 5, "lm_head_bias": True}),
    "olmoe": (1, {"num_experts": 7, "num_experts_per_tok": 3}),
    "granitemoe": (2, {"num_local_experts": 7, "num_experts_per_tok": 3, "attention_multiplier": 0.2}),
    "ernie4_5_moe": (2, {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 37}),
    "gpt_oss": (2, {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 20}),
    "gemma4_text": (
        2,
        {
            "sliding_window": 20,
            "layer_types": KINDS,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 37,
            "tie_word_embeddings": False,
        },
    ),
}


class Cluster:
    """A prefill replica of two ranks, a decode replica of two stages, one of one rank, and their store."""

    def __init__(
        self,
        harness: E2eHarness,
        store: StoreHarness,
        num_layers: int,
        expected: list[int],
        two_ranks: Parallel,
        engine: dict[str, Any] | None = None,
    ) -> None:
        self._harness, self._store, self._engine = harness, store, engine
        self._two_ranks = two_ranks
        self._two_stages = Parallel(pp=2, devices=("cpu", "cpu"), layers=(1, num_layers - 1))
        self._expected = expected
        self.prefill: Replica
        self.decode: Replica
        self.single: Replica

    async def start(self) -> None:
        await self._store.start()
        add, how = self._harness, self._store
        settings: dict[str, Any] = {"frees_windows": True, "engine": self._engine}
        self.prefill = await add_with_store(add, how, "p", "prefill", parallel=self._two_ranks, **settings)
        self.decode = await add_with_store(add, how, "d", "decode", parallel=self._two_stages, **settings)
        self.single = await add_with_store(add, how, "s", **settings)

    async def check(self) -> None:
        """Check a hand-over, the store, a resumption and a migration."""
        await self.start()
        await self.check_hand_over()
        await self.check_store()
        await self.check_resumption(40)
        await self.check_migration(25)
        await self._harness.quiet()

    async def check_hand_over(self) -> None:
        submission = self._harness.submission("r", PROMPT, decode=self.decode, max_tokens=NUM_TOKENS)
        heard = await self._harness.run(self.prefill, submission)
        assert heard.failure is None, heard.failure
        assert heard.sequence() == self._expected
        assert heard.hand_over is not None
        assert heard.hand_over.num_moved_bytes > 0

    async def check_store(self) -> None:
        """What two ranks have stored, one loads."""
        await stored_blocks(self.prefill, NUM_FULL_BLOCKS)
        heard = await self._run(self.single, "loaded", max_tokens=NUM_TOKENS)
        assert heard.prefill is not None
        assert heard.prefill.num_loaded_tokens == {"dram": NUM_FULL_BLOCKS * BLOCK_TOKENS}
        assert heard.sequence() == self._expected

    async def check_resumption(self, num_before: int) -> None:
        """Elsewhere, after so many tokens."""
        submission = self._harness.submission(
            "resumed",
            PROMPT,
            decode=self.decode,
            attempt=1,
            output=self._expected[:num_before],
            max_tokens=NUM_TOKENS,
        )
        heard = await self._harness.run(self.prefill, submission)
        assert heard.failure is None, heard.failure
        assert sorted(heard.tokens[0]) == list(range(num_before, NUM_TOKENS))
        assert [heard.tokens[0][index] for index in range(num_before, NUM_TOKENS)] == self._expected[
            num_before:
        ]

    async def check_migration(self, num_before: int) -> None:
        """From two stages to one rank, after at least so many tokens."""
        submission = self._harness.submission("moved", PROMPT, max_tokens=NUM_TOKENS)
        heard = await started(self._harness, self.decode, submission, num_before)
        move(submission, self.decode, self.single)
        await until(lambda: bool(heard.moves), "the move has ended")
        await self._harness.ended(submission)
        assert [ended.error for ended in heard.moves] == [""]
        assert heard.sequence() == self._expected

    async def _run(self, at: Replica, name: str, **sampling: Any) -> Heard:
        heard = await self._harness.run(at, self._harness.submission(name, PROMPT, **sampling))
        assert heard.failure is None, heard.failure
        return heard


async def check_tokens(model_dir: Path, tmp_path: Path, two_ranks: Parallel, num_layers: int) -> None:
    """Compare the tokens of a cluster with what transformers generates."""
    expected = continued(model_dir, PROMPT, NUM_TOKENS)
    assert len(set(expected)) >= 15, "a stream that repeats itself shows little"
    harness = E2eHarness(model_dir)
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        await Cluster(harness, store, num_layers, expected, two_ranks).check()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
async def test_kv_of_8_bits_gives_the_tokens_of_one_engine(
    family: str, kv_dtype: str, tmp_path: Path
) -> None:
    """The same KV in mixed shapes, moved and stored in 8 bits; other KV is refused by name."""
    latents = FAMILIES["deepseek_v2"] | {"kv_lora_rank": 48, "qk_rope_head_dim": 16}
    keys = SHAPE | (latents if family == "deepseek_v2" else {})
    write_random_checkpoint(tmp_path / "model", family, seed=7, **keys)
    engine = {"kv_dtype": kv_dtype}
    harness = E2eHarness(tmp_path / "model")
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        alone = await harness.add("alone", engine=engine)
        heard = await harness.run(alone, harness.submission("alone", PROMPT, max_tokens=NUM_TOKENS))
        assert len(set(heard.sequence())) >= 15, "a stream that repeats itself shows little"
        assert alone.core.compatibility.kv_dtype == kv_dtype
        cluster = Cluster(
            harness, store, SHAPE["num_hidden_layers"], heard.sequence(), Parallel(tp=2), engine
        )
        await cluster.check()


@pytest.mark.parametrize("family", FAMILIES)
async def test_mixed_shapes_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    keys = SHAPE | FAMILIES[family]
    write_random_checkpoint(tmp_path / "model", family, seed=7, **keys)
    await check_tokens(tmp_path / "model", tmp_path, Parallel(tp=2), keys["num_hidden_layers"])


@pytest.mark.parametrize("family", EXPERTS)
async def test_experts_in_mixed_shapes_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    ep, keys = EXPERTS[family]
    write_family_checkpoint(tmp_path / "model", family, seed=7, head_dim=16, **(SHAPE | keys))
    await check_tokens(tmp_path / "model", tmp_path, Parallel(tp=2, ep=ep), SHAPE["num_hidden_layers"])
