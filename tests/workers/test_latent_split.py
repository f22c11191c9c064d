"""The division of latents by the tokens of blocks: who holds which, what crosses between ranks of any
division, memory, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.random_checkpoint import write_config
from kvtransfer.blocks.layout import BlockLayout, landing_shards, plan_pieces
from kvtransfer.messages import CompatibilityRecord, Shard
from workers.errors import CheckpointError
from workers.model.kv_form import KvForm
from workers.model.kv_layout import kv_layout, token_parts
from workers.model.latent_split import LatentSplit, refuse_latent_split
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.rank_memory import RankShape, activation_bytes

LATENTS: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 37,
    "first_k_dense_replace": 1,
}
BLOCK = 32
FORM = KvForm.of("auto", 2)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    write_config(tmp_path, "deepseek_v2", "bfloat16", **LATENTS)
    return read_model_config(tmp_path)


@given(st.sampled_from([1, 2, 4, 8, 32]), st.integers(0, 200))
def test_each_token_is_held_once(num_ranks: int, num_tokens: int) -> None:
    split = LatentSplit(BLOCK, num_ranks)
    held = [split.held_places(num_tokens, rank).tolist() for rank in range(num_ranks)]
    assert sorted(itertools.chain(*held)) == list(range(num_tokens))
    for rank, places in enumerate(held):
        assert all(it % BLOCK // (BLOCK // num_ranks) == rank for it in places)
        assert split.num_held(np.array([num_tokens]), rank).tolist() == [len(places)]
    assert max(map(len, held)) - min(map(len, held)) <= split.part_tokens


def divided(model: ModelConfig, tp: int, *, is_split: bool) -> list[tuple[int, Shard]]:
    layers = range(model.num_layers)
    layouts = [kv_layout(model, layers, rank, tp, BLOCK, FORM, is_split=is_split) for rank in range(tp)]
    return [(rank, layout.shard) for rank, layout in enumerate(layouts)]


@pytest.mark.parametrize("source", [(1, False), (2, True), (4, True), (2, False)])
@pytest.mark.parametrize("target", [(1, False), (2, True), (4, True), (4, False)])
def test_latents_cross_once_between_any_divisions(
    model: ModelConfig, source: tuple[int, bool], target: tuple[int, bool]
) -> None:
    record = CompatibilityRecord(
        8, b"model", "bfloat16", "bfloat16", BLOCK, 3, 1, 32, num_kinds=1, token_parts=BLOCK
    )
    assert token_parts(model, BLOCK, FORM) == BLOCK
    assert record.token_bytes == 3 * 32 * 2
    writers, readers = (divided(model, tp, is_split=is_split) for tp, is_split in (source, target))
    pieces = plan_pieces(writers, landing_shards(readers))
    sizes = [BlockLayout.of(record, it.piece).block_bytes for it in pieces]
    assert sum(sizes) == BLOCK * record.token_bytes
    assert {it.source_rank for it in pieces} == set(range(source[0])), "all ranks send a part"


def test_ranks_keep_their_part_of_each_block(model: ModelConfig) -> None:
    layers = range(model.num_layers)
    whole = kv_layout(model, layers, 0, 1, BLOCK, FORM)
    assert whole.block_bytes == BLOCK * 3 * 32 * 2
    for tp in (2, 4):
        copies, parts = (
            [kv_layout(model, layers, rank, tp, BLOCK, FORM, is_split=it) for rank in range(tp)]
            for it in (False, True)
        )
        assert {it.block_bytes for it in copies} == {whole.block_bytes}
        assert {it.block_bytes for it in parts} == {whole.block_bytes // tp}
    # Scales lie behind the tokens of a block, which is then one part.
    assert token_parts(model, BLOCK, KvForm.of("int8", 2)) == 1


def test_memory_counts_the_part_and_what_is_exchanged(model: ModelConfig) -> None:
    alone, copy, part = (
        RankShape(model, 0, 3, tp=tp, splits_latents=is_split)
        for tp, is_split in ((1, True), (4, False), (4, True))
    )
    assert (alone.kv_token_bytes(2), copy.kv_token_bytes(2), part.kv_token_bytes(2)) == (192, 192, 48)
    needs = [activation_bytes(it, 2, 64, 16) for it in (copy, part)]
    row = 8 * (2 * 32 * 2 + 4 * (32 + 4 * 27))
    assert needs[1] - needs[0] == max(64 * row, model.max_context_tokens * 32 * 2)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"tp": 3}, "tp 3 does not divide block_tokens 32"),
        ({"kv_dtype": "int8"}, "kv_dtype int8 has scales"),
        ({"num_offload_tokens": 64}, "set offload_tokens: 0"),
        ({"is_deterministic": True}, "set replicated, or deterministic: false"),
        ({"devices": ("cpu", "cuda:1")}, "not yet validated on a card"),
    ],
)
def test_what_is_not_divided_is_refused(model: ModelConfig, changed: dict[str, Any], problem: str) -> None:
    settings: dict[str, Any] = {
        "tp": 2,
        "block_tokens": BLOCK,
        "kv_dtype": "auto",
        "num_offload_tokens": 0,
        "is_deterministic": False,
        "devices": ("cpu",),
    }

    def refuse(latent_kv: str, **settings: Any) -> None:
        refuse_latent_split(model, latent_kv, settings.pop("devices"), **settings)

    refuse("split", **settings)
    refuse("replicated", **settings | changed)
    with pytest.raises(CheckpointError, match=rf"^engine\.latent_kv split: .*{problem}"):
        refuse("split", **settings | changed)


def test_a_model_without_latents_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "llama", "bfloat16")
    model = read_model_config(tmp_path)
    with pytest.raises(CheckpointError, match="keys and values of several heads"):
        refuse_latent_split(
            model,
            "split",
            ("cpu",),
            tp=2,
            block_tokens=BLOCK,
            kv_dtype="auto",
            num_offload_tokens=0,
            is_deterministic=False,
        )
