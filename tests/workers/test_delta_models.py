"""Models with layers of the gated delta rule: what their checkpoints have beside these layers, rounding,
deterministic results, and experts on several ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import CASES, write_family_checkpoint
from hybrid_variants import DELTA_HEADS
from optional_programs import needs_compiler
from paged_model import PagedModel, reference_logits, reference_of, tokens_of
from parallel_ranks import ParallelCase, RankProcesses, form, run_case
from safetensors.torch import load_file, save_file
from torch import Tensor

from workers.errors import CheckpointError
from workers.model.decoder import load_decoder
from workers.model.model_config import read_model_config
from workers.model.state.delta_shape import DeltaShape

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    **DELTA_HEADS,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 21,
    "shared_expert_intermediate_size": 51,
}
NUM_STEPS = 6


def typical_error(actual: Tensor, expected: Tensor) -> float:
    """Return the median over tokens of the largest difference of a logit, as a part of the largest."""
    return float((actual - expected).abs().amax(1).median() / expected.abs().max())


# Where tokens choose all experts, as in `test_family_parity`.
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", ["qwen3_next-3", "qwen3_5_text-1", "qwen3_5_moe_text-3"])
def test_bfloat16_is_mostly_as_close_to_float32_as_transformers(case: str, tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, **(CASES[case] | {"dtype": "bfloat16"}))
    prompt = tokens_of(2, 70)
    exact = reference_logits(reference_of(tmp_path), prompt)
    allowed = 1.3 * typical_error(reference_logits(reference_of(tmp_path, torch.bfloat16), prompt), exact)
    assert 1e-4 < allowed < 0.05
    model = PagedModel(load_decoder(tmp_path, torch.bfloat16, CPU), torch.bfloat16)
    for sequence, chunk_tokens in enumerate((1, 40, 70)):
        assert typical_error(model.chunked(sequence, prompt, chunk_tokens), exact) <= allowed


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_logits_depend_neither_on_cuts_nor_on_company(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    write_family_checkpoint(tmp_path, "qwen3_5_text", dtype=str(dtype).removeprefix("torch."), **SHAPE)
    model = PagedModel(load_decoder(tmp_path, dtype, CPU, is_deterministic=True), dtype)
    prompt = tokens_of(3, 50)
    whole = model.chunked(0, prompt, 50)
    for sequence, chunk_tokens in enumerate((1, 7, 16), 1):
        assert torch.equal(model.chunked(sequence, prompt, chunk_tokens), whole)
    work = [(4, prompt[:30]), (5, tokens_of(4, 33)), (6, tokens_of(5, 1))]
    assert torch.equal(model.step(work)[0], whole[:30])
    assert torch.equal(model.step([(6, [3]), (4, prompt[30:])])[1], whole[30:])


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, "qwen3_next", **SHAPE, **EXPERTS)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"mtp.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}, file)
    load_decoder(tmp_path, torch.float32, CPU)
    save_file(tensors | {"other.layers.0.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(CheckpointError, match=r"unexpected tensor other\.layers\.0\.weight"):
        load_decoder(tmp_path, torch.float32, CPU)


def test_a_decay_of_16_bits_is_read_in_32(tmp_path: Path) -> None:
    """What a checkpoint has in float32 beside weights of 16 bits is not rounded to these."""
    write_family_checkpoint(tmp_path, "qwen3_5_text", dtype="bfloat16", **SHAPE)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.linear_attn.A_log"
    tensors[name] = torch.full((8,), 1 / 3)
    save_file(tensors, file)
    model = PagedModel(load_decoder(tmp_path, torch.bfloat16, CPU), torch.bfloat16)
    exact = model.chunked(0, tokens_of(1, 20), 20)
    save_file(tensors | {name: tensors[name].bfloat16()}, file)
    rounded = PagedModel(load_decoder(tmp_path, torch.bfloat16, CPU), torch.bfloat16)
    assert not torch.equal(rounded.chunked(0, tokens_of(1, 20), 20), exact)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"linear_num_key_heads": 3, "linear_num_value_heads": 6}, r"num_key_value_heads 2 divides .* 3 key"),
        ({"linear_num_value_heads": 6}, r"linear_num_value_heads 6 is no multiple of the 4 key heads"),
        ({"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim 1 is a convolution without a state"),
        ({"layer_types": ["full_attention"] * 3}, r"layer_types .* does not name the 4 layers"),
        ({"layer_types": ["mamba"] * 4}, r"layer_types .* has 'mamba', which is not supported"),
    ],
)
def test_states_that_are_not_supported_are_refused(
    keys: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write_family_checkpoint(tmp_path, "qwen3_5_text", **SHAPE)
    read_model_config(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | keys
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=problem):
        read_model_config(tmp_path)


def test_a_part_has_the_convolution_and_the_matrices_of_its_heads(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, "qwen3_5_text", **SHAPE)
    state = read_model_config(tmp_path).state
    assert isinstance(state, DeltaShape)
    assert (state.layers, state.attending) == ((0, 1, 2), (3,))
    # Of 4 key heads with 2 value heads each, a part has 2 with 4.
    num_channels = 2 * (2 * 12 + 2 * 32)
    assert state.part_size(2) == 3 * num_channels + 4 * 12 * 32


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses(4) as started:
        yield started


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize(("ep", "stages"), [(2, [(0, 4)]), (2, [(0, 1), (1, 4)])], ids=["2x1", "2x2"])
def test_experts_of_other_ranks(
    family: str, ep: int, stages: list[tuple[int, int]], processes: RankProcesses, tmp_path: Path
) -> None:
    write_family_checkpoint(tmp_path, family, seed=1, **SHAPE, **EXPERTS)
    prompts, chunks = [tokens_of(1, 41), tokens_of(2, 70)], [[16, 1, 24], [70]]
    whole = ParallelCase("whole", str(tmp_path), 1, [(0, 4)], prompts, chunks, NUM_STEPS, str(tmp_path))
    expected = run_case(whole, form(whole, None, 0))
    output = tmp_path / "found"
    output.mkdir()
    name = f"{family} {len(stages)}"
    case = ParallelCase(name, str(tmp_path), 2, stages, prompts, chunks, NUM_STEPS, str(output), ep)
    processes.run(case)
    found = load_file(output / f"{case.num_ranks - 2}.safetensors")
    assert torch.equal(found["tokens"], expected["tokens"])
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=5e-4)
