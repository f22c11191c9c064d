"""Models of many families give, with quantized weights, the logits of what their weights are worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import latent, write_family_checkpoint
from optional_programs import needs_compiler, uses_compiler
from paged_model import PagedModel, error_of, reference_logits, reference_of, tokens_of
from parallel_ranks import ParallelCase, RankProcesses, form, run_case
from quantized_checkpoints import FORMATS, OWN_ORDERS, quantize
from safetensors.torch import load_file

from workers.model import native
from workers.model.decoder import load_decoder
from workers.model.experts.expert_products import ExpertWeights
from workers.model.experts.quantized_experts import QuantizedExpertWeights
from workers.model.model_config import read_model_config
from workers.model.quantization.weight_form import WeightForm
from workers.model.weights import ShardSpec, WeightReader

pytestmark = uses_compiler

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# A format, and what the family has beside the shape.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("gptq with zero points", {"family": "llama", "attention_bias": True}),
    "llama in many orders": (OWN_ORDERS, {"family": "llama"}),
    "llama without a head": ("int4", {"family": "llama", "tie_word_embeddings": True}),
    "phi3": ("awq", {"family": "phi3"}),
    "qwen2": ("int8", {"family": "qwen2"}),
    "glm4": ("fp8 of channels", {"family": "glm4"}),
    "gemma2": ("fp8 in blocks", {"family": "gemma2", "sliding_window": 20}),
    "granite": ("gptq in another order", {"family": "granite", "residual_multiplier": 0.5}),
    "cohere": ("int4 with zero points", {"family": "cohere"}),
    "qwen3_moe": ("awq", {"family": "qwen3_moe", **_EXPERTS}),
    "mixtral": ("gptq", {"family": "mixtral", "num_local_experts": 5}),
    "mixtral in another order": ("gptq in another order", {"family": "mixtral", "num_local_experts": 3}),
    "qwen3_next": (
        "fp8 in blocks",
        {
            "family": "qwen3_next",
            **_EXPERTS,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "qwen3_5": (
        "gptq",
        {
            "family": "qwen3_5_text",
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "lfm2": (
        "gptq in another order",
        {"family": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "granitemoehybrid": (
        "awq",
        {
            "family": "granitemoehybrid",
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
        },
    ),
    "deepseek_v3": (
        "fp8 in blocks",
        {
            "family": "deepseek_v3",
            **latent(
                q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
            ),
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_dequantized_weights(model: str, tmp_path: Path) -> None:
    """To the last bit where they are dequantized as they are read."""
    how, keys = MODELS[model]
    write_family_checkpoint(tmp_path / "source", **SHAPE | keys)
    plain = quantize(tmp_path / "source", tmp_path, FORMATS[how])
    prompt = tokens_of(1, 70)

    def logits_of(folder: Path, form: str = "auto") -> torch.Tensor:
        decoder = load_decoder(folder, torch.float32, CPU, form=WeightForm(form))
        return PagedModel(decoder, torch.float32).chunked(0, prompt, 32)

    same = logits_of(plain)
    assert torch.equal(logits_of(tmp_path, "fp32"), same)
    kept = logits_of(tmp_path)
    assert torch.equal(kept, same) == (native.load() is None)
    expected = reference_logits(reference_of(plain), prompt)
    assert expected.std() >= 0.1
    assert error_of(kept, expected) <= 1e-3


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("model", ["granite", "qwen3_moe", "phi3", "qwen3_next"])
def test_ranks_hold_their_parts(model: str, tp: int, tmp_path: Path) -> None:
    """Also where a border between ranks cuts a group, or where the groups are not of neighbors."""
    how, keys = MODELS[model]
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3} if tp == 3 else {}
    if tp == 3 and model == "qwen3_next":
        pytest.skip("states are divided by the heads of keys")
    write_family_checkpoint(tmp_path / "source", **SHAPE | shape | keys)
    plain = quantize(tmp_path / "source", tmp_path, FORMATS[how])
    config = load_decoder(plain, torch.float32, CPU).config
    quantized_config = load_decoder(tmp_path, torch.float32, CPU).config
    form = WeightForm("fp32")
    for rank in range(tp):
        shard = ShardSpec(0, 2, rank, tp)
        with (
            WeightReader(tmp_path, quantized_config, shard, torch.float32, CPU, form=form) as found,
            WeightReader(plain, config, shard, torch.float32, CPU) as expected,
        ):
            for layer in range(2):
                ours, theirs = found.layer(layer), expected.layer(layer)
                for name in ("qkv", "output", "gate_up", "down"):
                    part, other = getattr(ours, name), getattr(theirs, name)
                    assert (part is None) == (other is None)
                    assert part is None or torch.equal(part.weight, other.weight)
                assert (ours.mixture is None) == (theirs.mixture is None)
                if ours.mixture is not None and theirs.mixture is not None:
                    experts, others = ours.mixture.experts, theirs.mixture.experts
                    for kind in ("gates", "ups", "downs"):
                        assert all(map(torch.equal, getattr(experts, kind), getattr(others, kind)))


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses(2) as started:
        yield started


@pytest.mark.parametrize("layout", ["2x1", "1x2"])
@pytest.mark.parametrize("model", ["llama with biases", "granite", "deepseek_v3"])
def test_ranks_together_equal_one(model: str, layout: str, processes: RankProcesses, tmp_path: Path) -> None:
    """Logits and tokens of two ranks are those of the dequantized weights on two ranks."""
    how, keys = MODELS[model]
    write_family_checkpoint(tmp_path / "source", **SHAPE | keys)
    plain = quantize(tmp_path / "source", tmp_path, FORMATS[how])
    tp, stages = (2, [(0, 2)]) if layout == "2x1" else (1, [(0, 1), (1, 2)])
    found: list[dict[str, torch.Tensor]] = []
    for folder in (tmp_path, plain):
        name = f"{model} {layout} {folder.name}"
        case = ParallelCase(name, str(folder), tp, stages, [tokens_of(1, 50)], [[32, 18]], 6, str(folder))
        processes.run(case)
        found.append(load_file(folder / f"{len(stages) - 1}.safetensors"))
    assert found[0]["logits"].std() >= 0.1
    assert error_of(found[0]["logits"], found[1]["logits"]) <= 1e-4
    if layout == "2x1":
        alone = ParallelCase("alone", str(plain), 1, [(0, 2)], [tokens_of(1, 50)], [[32, 18]], 6, str(plain))
        assert error_of(found[0]["logits"], run_case(alone, form(alone, None, 0))["logits"]) <= 1e-4


@needs_compiler
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_next"])
def test_experts_stay_quantized(model: str, tp: int, ep: int, tmp_path: Path) -> None:
    """Of each rank: they are those of the dequantized weights, in a tensor for each expert or for all."""
    if ep > tp:
        pytest.skip("no more parts than ranks")
    how, keys = MODELS[model]
    write_family_checkpoint(tmp_path / "source", **SHAPE | keys)
    plain = quantize(tmp_path / "source", tmp_path, FORMATS[how])
    for rank in range(tp):
        shard = ShardSpec(0, 1, rank, tp, ep)
        found, expected = (_experts_of(folder, shard) for folder in (tmp_path, plain))
        assert isinstance(found, QuantizedExpertWeights)
        assert isinstance(expected, ExpertWeights)
        for kind in ("gates", "ups", "downs"):
            kept, others = list(getattr(found, kind)), list(getattr(expected, kind))
            assert len(kept) == len(others)
            assert all(torch.equal(one.dequantized(), other) for one, other in zip(kept, others, strict=True))


def _experts_of(folder: Path, shard: ShardSpec) -> ExpertWeights | QuantizedExpertWeights:
    config = read_model_config(folder)
    with WeightReader(folder, config, shard, torch.float32, CPU) as reader:
        mixture = reader.layer(0).mixture
        assert mixture is not None
        experts = mixture.experts
        if isinstance(experts, QuantizedExpertWeights):
            return dataclasses.replace(
                experts, gates=list(experts.gates), ups=list(experts.ups), downs=list(experts.downs)
            )
        return dataclasses.replace(
            experts, gates=list(experts.gates), ups=list(experts.ups), downs=list(experts.downs)
        )
