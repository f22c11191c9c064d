"""Products of layers with a state stay quantized: what a rank holds of them, and what they take in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family_checkpoint
from optional_programs import needs_compiler
from quantized_checkpoints import FORMATS, LLAMA, quantize
from torch import Tensor

from workers.model.linear_weights import LinearWeights, are_quantized, are_tensors
from workers.model.model_config import read_model_config
from workers.model.quantization.packed_codes import PANEL, PackedForm
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.weight_form import AS_STORED, WeightForm
from workers.model.rank_memory import Checkpoint, RankShape
from workers.model.weights import ShardSpec, WeightReader

CPU = torch.device("cpu")
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
# A format, what the model has, and whether the products of the hidden states are one: those of the delta rule
# are not, where those of betas and decays are floats.
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "qwen3_next": (
        "fp8 in blocks",
        {**_DELTA, **_EXPERTS, "family": "qwen3_next", "shared_expert_intermediate_size": 64},
        False,
    ),
    "qwen3_5": ("int4 with zero points", {**_DELTA, "family": "qwen3_5_text"}, False),
    "lfm2": (
        "gptq",
        {"family": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        True,
    ),
    "granitemoehybrid": (
        "awq",
        {**_MAMBA, "family": "granitemoehybrid", "layer_types": ["mamba", "attention"]}
        | {"num_local_experts": 0, "shared_intermediate_size": 64},
        True,
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, bool]:
    """Write a model in its format: its folder, that of its values, and whether its inputs are one product."""
    how, keys, is_joined = MODELS[request.param]
    write_family_checkpoint(tmp_path / "source", **LLAMA | keys)
    return tmp_path, quantize(tmp_path / "source", tmp_path, FORMATS[how]), is_joined


def _products(folder: Path, shard: ShardSpec, form: WeightForm = AS_STORED) -> list[LinearWeights]:
    """Read those of the first layer, which has a state: the last one is that of what it mixes."""
    config = read_model_config(folder)
    with WeightReader(folder, config, shard, torch.float32, CPU, form=form) as reader:
        state = reader.layer(0).state
        assert state is not None
        return [_copied(it) for it in (*state.inputs, state.output)]


def _copied(product: LinearWeights) -> LinearWeights:
    parts = product.parts
    if are_tensors(parts):
        return LinearWeights(tuple(it.clone() for it in parts), None)
    assert are_quantized(parts)
    return LinearWeights(tuple(it.at(torch.arange(it.num_outputs)) for it in parts), None)


def _values(products: list[LinearWeights]) -> list[Tensor]:
    """Return the weight of all inputs, and that of the output."""
    each = [
        torch.cat([it.dequantized() if isinstance(it, QuantizedWeight) else it for it in product.parts])
        for product in products
    ]
    return [torch.cat(each[:-1]), each[-1]]


@needs_compiler
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_keep_their_parts_quantized(model: tuple[Path, Path, bool], tp: int) -> None:
    folder, plain, is_joined = model
    for rank in range(tp):
        shard = ShardSpec(0, 1, rank, tp)
        found, expected = _products(folder, shard), _products(plain, shard)
        assert len(found) == 2 + (not is_joined)
        assert are_quantized(found[0].parts)
        assert are_quantized(found[-1].parts)
        assert all(map(torch.equal, _values(found), _values(expected)))


@needs_compiler
def test_rounded_ones_are_one_product(model: tuple[Path, Path, bool]) -> None:
    _, plain, _ = model
    found = _products(plain, ShardSpec(0, 1), WeightForm("int4"))
    assert len(found) == 2
    assert all(are_quantized(product.parts) for product in found)


@needs_compiler
def test_products_of_states_are_counted_as_they_are_kept(model: tuple[Path, Path, bool]) -> None:
    folder, _, _ = model
    checkpoint, rank = Checkpoint.read(folder), RankShape(read_model_config(folder), 0, 1)
    of_state = Checkpoint(
        {it: size for it, size in checkpoint.name_to_size.items() if _is_of_state(it)},
        checkpoint.name_to_format,
    )
    saved = 0.0
    for product in _products(folder, ShardSpec(0, 1)):
        if are_quantized(product.parts):
            whole = QuantizedWeight.joined(product.parts)
            assert whole is not None
            form = PackedForm.of([whole])
            assert form is not None
            num_panels = -(-whole.num_outputs // PANEL)
            saved += 2 * whole.num_outputs * whole.num_inputs - num_panels * form.num_panel_bytes
    counted = of_state.weight_bytes(rank, 2) - of_state.weight_bytes(rank, 2, AS_STORED)
    assert counted == pytest.approx(saved, rel=0.2)


def _is_of_state(name: str) -> bool:
    return any(block in name for block in (".linear_attn.", ".conv.", ".mamba."))
