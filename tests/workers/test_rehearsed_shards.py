"""The parts of a model over which a rank's kernels are found, before the layers of its stage are decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_specs import cuda_spec

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.errors import CheckpointError
from workers.model.weights import ShardSpec
from workers.rank.rehearsed_shards import rehearsed_shards

# Dense layers, 0 and 2, and layers with experts, 1 and 3.
TWO_KINDS: dict[str, Any] = {"num_hidden_layers": 4, "mlp_only_layers": [0, 2], "num_experts": 4}


def layers_of(folder: Path, **fields: Any) -> list[tuple[int, int]]:
    return [(it.layer_start, it.layer_end) for it in rehearsed_shards(cuda_spec(folder, **fields))]


def test_a_stage_may_begin_with_a_layer_of_each_kind(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "qwen2_moe", seed=1, **TWO_KINDS)
    assert layers_of(tmp_path) == [(0, 4)]
    assert layers_of(tmp_path, pp=2, rank=0) == [(0, 3)]
    assert layers_of(tmp_path, pp=2, rank=1) == [(1, 4), (2, 4)]
    assert layers_of(tmp_path, pp=3, rank=1) == [(1, 3), (2, 3)]
    assert layers_of(tmp_path, pp=4, rank=2) == [(2, 3)]


def test_equal_layers_are_taken_once(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama", seed=1, num_hidden_layers=5)
    assert [layers_of(tmp_path, pp=3, rank=rank) for rank in range(3)] == [[(0, 3)], [(1, 4)], [(2, 5)]]


def test_layers_that_share_keys_and_values_are_on_the_last_stage(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 7}
    fields |= {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16}
    fields["layer_types"] = ["sliding_attention", "full_attention"] * 3
    write_random_checkpoint(tmp_path, "gemma4_text", seed=1, **fields)
    assert layers_of(tmp_path, pp=2, rank=0) == [(0, 2)]
    assert [end for _, end in layers_of(tmp_path, pp=2, rank=1)] == [6, 6]


def test_a_rank_has_its_part_of_layers_and_experts(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "qwen2_moe", seed=1, **TWO_KINDS)
    (shard,) = rehearsed_shards(cuda_spec(tmp_path, tp=4, ep=2, pp=2, rank=3))
    assert shard == ShardSpec(0, 3, tp_rank=3, tp_size=4, ep_size=2)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama", seed=1, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="pp 3 is more than num_hidden_layers 2"):
        rehearsed_shards(cuda_spec(tmp_path, pp=3))
