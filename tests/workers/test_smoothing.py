"""Factors that move the range of inputs into weights: they change nothing before rounding, and less is lost
by rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import unpacked_tensors
from decoder_logits import decoder_logits
from safetensors.torch import save_file
from torch import Tensor

from workers.quantizer.calibrated_rounder import CalibratedRounder
from workers.quantizer.checkpoint_plan import SourceTensors
from workers.quantizer.factor_search import searched_factors
from workers.quantizer.input_sample import InputSample
from workers.quantizer.quantize_checkpoint import QuantizationJob
from workers.quantizer.rounded_inputs import round_inputs, round_product_inputs
from workers.quantizer.smoothing_factors import LayerFactors
from workers.quantizer.smoothing_pairs import LayerPairs, SmoothingPair
from workers.quantizer.target import QuantizationTarget
from workers.quantizer.text_perplexity import layered_perplexity

MakeCheckpoint = Callable[..., Path]
PROMPT = [token * 7 % 200 for token in range(40)]
ALL = {"projection", "gate_up", "output", "down"}


def _pairs(folder: Path, layer: int) -> list[SmoothingPair]:
    with SourceTensors(folder) as source:
        known = {tensor.name for tensor in source.tensors}
        return LayerPairs(source.config, source.names, layer, known).all()


def _num_factors(pair: SmoothingPair, tensors: dict[str, Tensor]) -> int:
    if pair.heads is not None:
        return pair.heads.num_kv_heads * pair.heads.head_dim
    return tensors[pair.weights[0]].shape[1]


def _smoothed(source: Path, out: Path) -> set[str]:
    """Write the checkpoint with drawn factors in all layers; return the products that have some in each."""
    tensors, drawn = unpacked_tensors.stored_tensors(source), torch.Generator().manual_seed(3)
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    products: set[str] = set()
    for layer in range(layers):
        factored = []
        for pair in _pairs(source, layer):
            exponents = torch.randint(-3, 4, (_num_factors(pair, tensors),), generator=drawn)
            factored.append((pair, torch.exp2(exponents.float())))
        factors = LayerFactors.of(factored, tensors.__getitem__)
        assert factors.columns.keys() == {name for pair, _ in factored for name in pair.weights}
        tensors |= {name: factors.applied(name, it) for name, it in tensors.items() if f"s.{layer}." in name}
        products |= {pair.product for pair, _ in factored}
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: it.contiguous() for name, it in tensors.items()}, out / "model.safetensors")
    return products


@pytest.mark.parametrize(
    ("family", "products"),
    [
        ("llama", ALL),
        ("qwen2", ALL),  # biases of values
        ("phi3", ALL),  # fused tensors
        ("glm4", ALL),
        ("stablelm", ALL),  # biases of norms
        ("cohere", ALL - {"gate_up"}),  # one norm for attention and feed-forward
        ("olmo2", {"output", "down"}),  # no norms of inputs
        ("qwen3_moe", {"projection", "output"}),  # a router takes the norm as well
        ("deepseek_v3", {"gate_up", "down"}),  # latents, and a first layer without experts
    ],
)
def test_factors_change_no_bit_of_a_model(
    family: str, products: set[str], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(family, dtype="float32")
    assert _smoothed(source, tmp_path / "out") == products
    stored, found = (unpacked_tensors.stored_tensors(it) for it in (source, tmp_path / "out"))
    assert not all(torch.equal(stored[name], found[name]) for name in stored)
    assert torch.equal(decoder_logits(tmp_path / "out", PROMPT), decoder_logits(source, PROMPT))


def test_norms_with_an_offset_are_made_up_for(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """What is stored of them is rounded, here to float32."""
    source = make_checkpoint("gemma2", dtype="float32")
    assert _smoothed(source, tmp_path / "out") == ALL
    expected = decoder_logits(source, PROMPT)
    torch.testing.assert_close(decoder_logits(tmp_path / "out", PROMPT), expected, rtol=1e-4, atol=1e-5)


def test_searched_factors_lose_less_where_inputs_have_outliers() -> None:
    """By a naive product of what is rounded; and where all inputs are alike, there are no factors."""
    drawn = torch.Generator().manual_seed(5)
    weight, inputs = torch.randn(48, 64, generator=drawn), torch.randn(300, 64, generator=drawn)
    pair = SmoothingPair("down", ("weight",), ())
    for has_outliers in (False, True):
        if has_outliers:
            inputs[:, 7] *= 60
        sample = InputSample(64)
        for window in torch.split(inputs, 100):
            sample.add(window)
        factors = searched_factors(pair, sample, [weight])
        if not has_outliers:
            assert factors.log2().abs().amax() <= 1
    plain, smooth = (_error(inputs, weight, it) for it in (torch.ones(64), factors))
    assert smooth < 0.3 * plain


def test_magnitudes_are_roots_of_fourth_powers() -> None:
    inputs, sample = torch.randn(90, 5, generator=torch.Generator().manual_seed(6)), InputSample(5)
    for window in (inputs[:30], inputs[30:40], inputs[40:]):
        sample.add(window)
    torch.testing.assert_close(sample.magnitudes, inputs.pow(4).mean(0).pow(0.25))


def test_factors_are_found_in_the_model_as_it_is(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Whatever was rounded before a layer. What is written differs from the checkpoint as the factors say."""
    source, target = make_checkpoint("qwen3", num_hidden_layers=3), QuantizationTarget.of("w8a8")
    windows = [torch.tensor(PROMPT), torch.tensor(PROMPT[5:])]
    whole, again = (CalibratedRounder(source, target, windows, torch.float32) for _ in range(2))
    QuantizationJob(source, tmp_path / "out", target, "smooth").run(whole)
    again.begin_layer(2)
    stored, plain = unpacked_tensors.stored_tensors(source), unpacked_tensors.unpacked(tmp_path / "out")
    prefix = "model.layers.2."
    norm = f"{prefix}input_layernorm.weight"
    assert torch.equal(again.kept(norm, stored[norm]), plain[norm])
    factors = stored[norm].float() / plain[norm].float()
    assert not torch.equal(factors, torch.ones_like(factors))
    queries = f"{prefix}self_attn.q_proj.weight"
    expected = stored[queries].float() * factors
    assert float((plain[queries] - expected).norm()) < 0.1 * float(expected.norm())


def test_inputs_are_rounded_for_the_perplexity(make_checkpoint: MakeCheckpoint) -> None:
    """To 8 bits by a scale of each token, and once: a product that rounds by itself changes nothing more."""
    inputs = torch.tensor([[0.5, -127.0, 0.2], [0.0, 0.0, 0.0], [1e-3, 2.54e-1, 5.1e-3]])
    expected = torch.tensor([[0.0, -127.0, 0.0], [0.0, 0.0, 0.0], [0.0, 2.54e-1, 6e-3]])
    torch.testing.assert_close(round_inputs(inputs), expected)
    torch.testing.assert_close(round_inputs(expected), expected)
    source, windows = make_checkpoint("qwen3"), [torch.tensor(PROMPT)]
    plain = layered_perplexity(source, torch.float32, windows)
    rounded = layered_perplexity(source, torch.float32, windows, watch=round_product_inputs)
    assert rounded != plain
    assert rounded == pytest.approx(plain, rel=0.05)


def _error(inputs: Tensor, weight: Tensor, factors: Tensor) -> float:
    wide = weight.double() * factors
    scales = wide.abs().amax(1, keepdim=True) / 127
    product = round_inputs(inputs.double() / factors).double() @ ((wide / scales).round() * scales).t()
    return float((product - inputs.double() @ weight.double().t()).square().sum())
