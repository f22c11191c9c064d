"""Experts that several ranks share, by their numbers or by their columns, give what they give on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family_checkpoint
from paged_model import error_of, reference_logits, reference_of
from parallel_ranks import ParallelCase, RankProcesses, form, run_case
from safetensors.torch import load_file
from slow_cases import slow_but

from workers.model.expert_rows import LEAST_ROWS
from workers.model.model_config import read_model_config
from workers.model.sizes import kv_heads, sends_rows

NUM_LAYERS = 3
NUM_STEPS = 8
# The first step takes more rows than `LEAST_ROWS`.
CHUNKS = [[500], [16, 1, 24], [5]]
LENGTHS = (500, 41, 5)
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 101,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 257,
    "num_hidden_layers": NUM_LAYERS,
}
# Neither numbers of experts nor their sizes can be divided evenly. The layers with experts of the third are
# between others; those of the last are in one tensor.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 37, "num_experts": 7, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "moe_intermediate_size": 21,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 51,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 37,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "granitemoe": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
    },
}
# The experts of one have biases; in the other, shared experts are beside them.
COPIED_FAMILIES = FAMILIES | {
    "gpt_oss": {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 20, "swiglu_limit": 0.8}
}
# The ranks of a stage, the parts of experts, and the stages.
LAYOUTS: dict[str, tuple[int, int, list[tuple[int, int]]]] = {
    "2x1": (2, 1, [(0, 3)]),
    "2x1-ep2": (2, 2, [(0, 3)]),
    "3x1-ep3": (3, 3, [(0, 3)]),
    "4x1-ep2": (4, 2, [(0, 3)]),
    "4x1-ep4": (4, 4, [(0, 3)]),
    "2x2-ep2": (2, 2, [(0, 1), (1, 3)]),
}


# The changes of copies before each step: the first steps have long chunks, the later ones decode. A slot is
# filled, filled anew and freed; an expert has two copies at once.
ORDERS: dict[str, list[list[tuple[int, int, int, int]]]] = {
    "2x1-ep2": [[(0, 1, 0, 0), (2, 0, 1, 4)], [], [(0, 1, 0, 1)], [], [(0, 1, 0, -1), (0, 0, 0, 4)]],
    "4x1-ep2": [[(0, 1, 0, 0), (2, 0, 1, 4)], [(1, 1, 1, 0)], [], [(0, 1, 0, 1)], [(2, 0, 1, -1)]],
    "4x1-ep4": [[(0, 1, 0, 0), (0, 2, 1, 0), (2, 3, 0, 1)], [(2, 3, 1, 0)], [(0, 1, 0, 4)], [(0, 2, 1, -1)]],
    "2x2-ep2": [[(0, 1, 0, 0)], [(2, 0, 1, 4), (2, 1, 0, 1)], [(0, 1, 0, 1), (2, 0, 1, 3)]],
}


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses(4) as started:
        yield started


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_on_any_ranks_equal_those_on_one(
    family: str, processes: RankProcesses, tmp_path: Path
) -> None:
    write_family_checkpoint(tmp_path, family, seed=1, **SHAPE, **FAMILIES[family])
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(257, (length,), generator=generator).tolist() for length in LENGTHS]
    assert sum(chunks[0] for chunks in CHUNKS) > LEAST_ROWS, "rows are sent to the ranks of their experts"

    def case(name: str, tp: int, ep: int, stages: list[tuple[int, int]]) -> ParallelCase:
        output_dir = tmp_path / name
        output_dir.mkdir()
        named = (f"{family} {name}", str(tmp_path), tp, stages, prompts)
        return ParallelCase(*named, CHUNKS, NUM_STEPS, str(output_dir), ep)

    mixture = read_model_config(tmp_path).mixture
    assert mixture is not None
    whole = case("1x1", 1, 1, [(0, NUM_LAYERS)])
    expected = run_case(whole, form(whole, None, 0))
    logits = reference_logits(reference_of(tmp_path), prompts[0])
    assert error_of(expected["logits"][: len(prompts[0])], logits) <= 1e-4
    for name, (tp, ep, stages) in LAYOUTS.items():
        split = case(name, tp, ep, stages)
        processes.run(split)
        for rank in range(split.num_ranks):
            found = load_file(tmp_path / name / f"{rank}.safetensors")
            assert bool(found["exchanged"]) == sends_rows(mixture, tp, ep)
            stage, tp_rank = divmod(rank, tp)
            heads = kv_heads(3, tp_rank, tp)
            own = expected["kv"][:, slice(*stages[stage]), :, heads.start : heads.stop]
            torch.testing.assert_close(found["kv"], own, rtol=1e-5, atol=2e-5)
            if stage == len(stages) - 1 and tp_rank == 0:
                assert torch.equal(found["tokens"], expected["tokens"])
                torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("family", slow_but(["qwen3_moe", "gpt_oss", "glm4_moe"], "qwen3_moe"))
def test_copies_that_change_between_steps_leave_results_as_they_are(
    family: str, processes: RankProcesses, tmp_path: Path
) -> None:
    """The rows of a copied expert are divided, and no row is computed twice or not at all."""
    write_family_checkpoint(tmp_path, family, seed=1, **SHAPE, **COPIED_FAMILIES[family])
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(257, (length,), generator=generator).tolist() for length in LENGTHS]

    def case(name: str, tp: int, ep: int, stages: list[tuple[int, int]]) -> ParallelCase:
        output_dir = tmp_path / name
        output_dir.mkdir()
        named = (f"{family} copies {name}", str(tmp_path), tp, stages, prompts)
        orders = ORDERS.get(name, [])
        return ParallelCase(*named, CHUNKS, NUM_STEPS, str(output_dir), ep, 2 if orders else 0, orders)

    whole = case("1x1", 1, 1, [(0, NUM_LAYERS)])
    expected = run_case(whole, form(whole, None, 0))
    for name in ORDERS:
        tp, ep, stages = LAYOUTS[name]
        split = case(name, tp, ep, stages)
        processes.run(split)
        ranks = [load_file(tmp_path / name / f"{rank}.safetensors") for rank in range(split.num_ranks)]
        sampling = ranks[(len(stages) - 1) * tp]
        assert torch.equal(sampling["tokens"], expected["tokens"])
        torch.testing.assert_close(sampling["logits"], expected["logits"], rtol=1e-5, atol=5e-5)
        firsts = ranks[:: tp // ep]  # ranks that share experts count the same tokens
        assert torch.equal(sum(it["of_experts"] for it in firsts), expected["of_experts"])
        assert any(it["copied"] for it in firsts), "copies computed some of the rows"
