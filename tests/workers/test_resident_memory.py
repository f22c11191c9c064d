"""The resident memory of a rank process: little beyond weights and KV, and the same after many steps.

`benchmarks/rank_memory.py` runs 1,500 steps on a model of 600 million parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.rank_memory import watch

_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_keeps_little_beside_weights_and_kv_and_does_not_grow(tmp_path: Path) -> None:
    """Of a bfloat16 model of 92 MiB with 240 MiB of KV, over steps that all differ."""
    write_random_checkpoint(tmp_path, "qwen3", seed=1, dtype="bfloat16", **_SIZES)
    course = watch(tmp_path, 80, kv_tokens=24576, step_tokens=256, num_slots=8, num_threads=1)
    assert course.ready.of_files < 130 << 20, "torch maps some 80 MiB; the checkpoint is not mapped any more"
    assert 1.0 < course.ratio <= 1.2
    assert course.growth < 8 << 20
