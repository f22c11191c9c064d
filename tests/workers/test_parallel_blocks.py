"""Layers of parallel attention and feed-forward, norms of heads by weights of their own, and latent attention
give on several ranks what they give on one, and a rank that fails makes up for their sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family_checkpoint
from parallel_ranks import BLOCK_TOKENS, ParallelCase, RankProcesses, form, run_case
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.decoder import load_decoder
from workers.model.model_config import read_model_config
from workers.model.parallel import Unfinished, parallelize
from workers.model.sizes import kv_heads
from workers.model.weights import ShardSpec

CPU = torch.device("cpu")
NUM_LAYERS = 3
UNEVEN: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 101,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 257,
    "num_hidden_layers": NUM_LAYERS,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 29,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 37,
    "n_group": 1,
    "topk_group": 1,
}
# The keys of each family, and how many sums over the ranks one of its layers takes.
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "cohere": ({"logit_scale": 1.2, "use_qk_norm": True, "attention_bias": True}, 1),
    "cohere2": ({"logit_scale": 1.2, "sliding_window": 20, "sliding_window_pattern": 2}, 1),
    "stablelm": ({"use_qkv_bias": True, "use_parallel_residual": True, "qk_layernorm": True}, 1),
    "stablelm-sequential": ({"partial_rotary_factor": 0.5, "tie_word_embeddings": True}, 2),
    "deepseek_v2-lite": (LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1}, 2),
    "deepseek_v3": (LATENT | {"attention_bias": True, "first_k_dense_replace": 2, "n_group": 2}, 2),
    "glm4_moe_lite": (LATENT | {"v_head_dim": 16, "tie_word_embeddings": True}, 2),
}
# With four ranks, two hold a copy of a head of keys and values, unless there are as many as heads of queries.
LAYOUTS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "3x1": (3, [(0, 3)]),
    "4x1": (4, [(0, 3)]),
    "2x2": (2, [(0, 1), (1, 3)]),
}


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses(4) as started:
        yield started


def write(path: Path, shape: str) -> None:
    write_family_checkpoint(path, shape.partition("-")[0], **UNEVEN, **SHAPES[shape][0])


@pytest.mark.parametrize("shape", SHAPES)
def test_any_split_of_such_layers_equals_one_rank(
    shape: str, processes: RankProcesses, tmp_path: Path
) -> None:
    write(tmp_path, shape)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(257, (length,), generator=generator).tolist() for length in (90, 41, 5)]

    def case(name: str, tp: int, stages: list[tuple[int, int]]) -> ParallelCase:
        output_dir = tmp_path / name
        output_dir.mkdir()
        chunks = [[90], [16, 1, 24], [5]]
        return ParallelCase(f"{shape} {name}", str(tmp_path), tp, stages, prompts, chunks, 8, str(output_dir))

    whole = case("1x1", 1, [(0, 3)])
    expected = run_case(whole, form(whole, None, 0))
    num_kv_heads = read_model_config(tmp_path).num_kv_heads
    for name, (tp, stages) in LAYOUTS.items():
        split = case(name, tp, stages)
        processes.run(split)
        for rank in range(split.num_ranks):
            found = load_file(tmp_path / name / f"{rank}.safetensors")
            stage, tp_rank = divmod(rank, tp)
            heads = kv_heads(num_kv_heads, tp_rank, tp)
            own = expected["kv"][:, slice(*stages[stage]), :, heads.start : heads.stop]
            torch.testing.assert_close(found["kv"], own, rtol=1e-5, atol=2e-5)
            if stage == len(stages) - 1 and tp_rank == 0:
                assert torch.equal(found["tokens"], expected["tokens"])
                torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=5e-5)


class _Recorded:
    """Collectives of the first of two ranks, which only record the shapes of what would be added up."""

    tp, tp_rank, shares_memory = 2, 0, True

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def all_reduce(self, tensor: Tensor) -> None:
        self.shapes.append(tuple(tensor.shape))

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[Tensor]:
        raise AssertionError("no layer sends rows to others")

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        return None


def test_a_rank_that_fails_makes_up_for_the_sum_of_the_inputs_of_layers(tmp_path: Path) -> None:
    """It follows that of the embedding."""
    write_random_checkpoint(
        tmp_path,
        "gemma4_text",
        seed=5,
        hidden_size=96,
        num_hidden_layers=NUM_LAYERS,
        sliding_window=20,
        global_head_dim=16,
        hidden_size_per_layer_input=5,
        vocab_size_per_layer_input=256,
    )
    decoder = load_decoder(tmp_path, torch.float32, CPU, ShardSpec(0, NUM_LAYERS, 0, 2))
    collectives = _Recorded()
    sums = Unfinished(collectives, decoder)
    parallelize(decoder, sums)
    sums.begin(5, 0)
    embedded = decoder.embed(torch.arange(5))
    assert embedded.shape == (5, 96 + NUM_LAYERS * 5)
    assert collectives.shapes == [(5, 96), (5, NUM_LAYERS * 5)]
    sums.finish(embedded)
    assert collectives.shapes == [(5, 96), (5, NUM_LAYERS * 5), *[(5, 96)] * (2 * NUM_LAYERS)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_that_fails_makes_up_for_all_sums_of_such_layers(shape: str, tmp_path: Path) -> None:
    write(tmp_path, shape)
    decoder = load_decoder(tmp_path, torch.float32, CPU, ShardSpec(0, NUM_LAYERS, 0, 2))
    collectives = _Recorded()
    sums = Unfinished(collectives, decoder)
    parallelize(decoder, sums)
    cells = decoder.config.kv_cells
    num_cells = len(kv_heads(cells.num_cells, 0, 2))
    kv = torch.zeros(1, NUM_LAYERS, cells.num_kinds, num_cells, BLOCK_TOKENS, cells.width)
    attention = choose_attention(decoder.attention_shape, kv)
    step = StepInput.of([SequenceSpan(0, 5, [0])], BLOCK_TOKENS)
    sums.begin(5, 0)
    hidden = decoder.forward(torch.arange(5), step, attention)
    computed, collectives.shapes = collectives.shapes, []
    assert computed == [(5, 96)] * (1 + NUM_LAYERS * SHAPES[shape][1])
    sums.finish(hidden)
    assert not collectives.shapes
    sums.begin(5, 0)
    sums.finish(hidden)
    assert collectives.shapes == computed
