"""Weights that are counted by a model's shape, against those of a checkpoint's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_checkpoints import write_family_checkpoint
from slow_cases import slow_but

from cluster.planning.planned_model import planned_model
from workers.model.rank_memory import RankShape

WIDE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 1000}
FAMILY_TO_KEYS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 700},
    "qwen3": {"num_key_value_heads": 8, "intermediate_size": 512, "tie_word_embeddings": True},
    "mixtral": {
        "num_key_value_heads": 4,
        "intermediate_size": 300,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "intermediate_size": 512,
        "moe_intermediate_size": 192,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}


@pytest.mark.parametrize("weight_dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("family", slow_but(FAMILY_TO_KEYS, "llama", "mixtral"))
def test_as_many_bytes_as_the_files_have(tmp_path: Path, family: str, weight_dtype: str) -> None:
    write_family_checkpoint(tmp_path, family, **WIDE | FAMILY_TO_KEYS[family])
    files = planned_model(str(tmp_path), weight_dtype, "auto")
    assert files.has_files
    shape = planned_model(str(tmp_path / "config.json"), weight_dtype, "auto")
    assert not shape.has_files
    device_splits = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)]
    for tp, pp, ep in device_splits if shape.shape.mixture is not None else device_splits[:3]:
        for first in range(0, 4, 4 // pp):
            rank = RankShape(shape.shape, first, first + 4 // pp, tp - 1, tp, ep)
            counted = shape.weights.weight_bytes(rank, 2, shape.form)
            assert counted == pytest.approx(files.weights.weight_bytes(rank, 2, files.form), rel=0.02)
            means = shape.weights.mean_bytes(rank, 2, shape.form)
            assert means == pytest.approx(files.weights.mean_bytes(rank, 2, files.form), rel=0.02)
