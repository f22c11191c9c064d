"""Experts with quantized weights by the CPU kernels, against their products one after another in float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import TILED_KERNELS, kernels_of
from optional_programs import needs_compiler
from torch import Tensor

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.model.decoder import load_decoder
from workers.model.experts.expert_products import gated
from workers.model.experts.mixture_shape import ExpertActivation
from workers.model.experts.native_routing import choose_by
from workers.model.experts.packed_mixture import PackedMixture
from workers.model.experts.packed_quantized_experts import PackedQuantizedExperts, packed_quantized_experts
from workers.model.experts.quantized_experts import QuantizedExpertWeights
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing
from workers.model.products import PackedLinear
from workers.model.quantization.packed_codes import PackedForm
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight
from workers.model.quantization.weight_form import WeightForm

NUM_EXPERTS, HIDDEN_SIZE, SIZE, NUM_CHOSEN = 5, 96, 64, 2

builds = pytest.mark.parametrize("build", TILED_KERNELS)


def made(codes: Codes, num_outputs: int, num_inputs: int, seed: int, *, has_offsets: bool) -> QuantizedWeight:
    drawn = torch.Generator().manual_seed(seed)
    size, groups = (num_outputs, num_inputs * codes.num_bits // 8), (num_outputs, num_inputs // 32)
    packed = torch.randint(0, 0x78, size, generator=drawn, dtype=torch.uint8)  # no NaN
    scales = torch.rand(groups, generator=drawn) * 2.0**-7
    offsets = torch.randn(groups, generator=drawn) * 0.02 if has_offsets else None
    return QuantizedWeight(codes, packed, scales, 32, offsets)


def experts_of(
    codes: Codes, *, activation: ExpertActivation = "silu", has_offsets: bool = False, has_bias: bool = False
) -> QuantizedExpertWeights:
    gates, ups, downs = (
        [made(codes, *shape, seed=first + expert, has_offsets=has_offsets) for expert in range(NUM_EXPERTS)]
        for first, shape in ((0, (SIZE, HIDDEN_SIZE)), (10, (SIZE, HIDDEN_SIZE)), (20, (HIDDEN_SIZE, SIZE)))
    )
    is_gated = activation != "relu2"
    gate_up_bias = torch.randn(NUM_EXPERTS, 2 * SIZE) if has_bias and is_gated else None
    down_bias = torch.randn(NUM_EXPERTS, HIDDEN_SIZE) if has_bias else None
    return QuantizedExpertWeights(gates if is_gated else (), ups, downs, activation, gate_up_bias, down_bias)


def routing_of(num_tokens: int) -> Routing:
    drawn = torch.Generator().manual_seed(num_tokens)
    experts = torch.stack([torch.randperm(NUM_EXPERTS, generator=drawn) for _ in range(num_tokens)])
    return Routing(experts[:, :NUM_CHOSEN].int(), torch.rand(num_tokens, NUM_CHOSEN, generator=drawn))


def expected(weights: QuantizedExpertWeights, x: Tensor, routing: Routing) -> Tensor:
    sums = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for expert, share in zip(routing.experts[token].tolist(), routing.weights[token], strict=True):
            inner = [of_all[expert].dequantized() for of_all in (weights.gates, weights.ups) if of_all]
            parts = torch.cat(inner)
            biases = [
                None if it is None else it[expert].double()
                for it in (weights.gate_up_bias, weights.down_bias)
            ]
            between = gated(F.linear(row, parts.double(), biases[0])[None], weights.activation, weights.clamp)
            sums[token] += share * F.linear(
                between[0], weights.downs[expert].dequantized().double(), biases[1]
            )
    return sums


def packed(build: str, weights: QuantizedExpertWeights) -> PackedQuantizedExperts:
    gate_up, down = PackedForm.of([*weights.gates, *weights.ups]), PackedForm.of(weights.downs)
    assert gate_up is not None
    assert down is not None
    return PackedQuantizedExperts(kernels_of(build), weights, gate_up, down)


@builds
@pytest.mark.parametrize("codes", Codes, ids=lambda codes: codes.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 7, 70])
def test_sums_are_those_of_the_experts(build: str, codes: Codes, dtype: torch.dtype, num_tokens: int) -> None:
    has_more = codes is Codes.UINT4
    code_to_activation: dict[Codes, ExpertActivation] = {Codes.UINT4: "clamped_swiglu", Codes.INT8: "relu2"}
    activation = code_to_activation.get(codes, "silu")
    weights = experts_of(codes, activation=activation, has_offsets=has_more, has_bias=has_more)
    experts, routing = packed(build, weights), routing_of(num_tokens)
    x = torch.randn(num_tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    rounded = dataclasses.replace(
        weights,
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias.to(dtype),
        down_bias=None if weights.down_bias is None else weights.down_bias.to(dtype),
    )
    exact = expected(rounded, x, routing)
    result = experts(x, routing)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    assert ((result.double() - exact).abs().max() / exact.abs().max()).item() < tolerance
    hidden = torch.ones_like(x)
    experts.add_to(hidden, x, routing)
    assert torch.equal(hidden, torch.ones_like(x) + result)
    assert experts.counts.sum() == 2 * num_tokens * NUM_CHOSEN
    for token in range(0, num_tokens, 9):
        one = slice(token, token + 1)
        alone = experts(x[one], Routing(routing.experts[one], routing.weights[one]))
        assert torch.equal(alone, result[one]), token


@builds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_mixture_is_its_router_and_its_experts(build: str, dtype: torch.dtype) -> None:
    """Bit for bit, with a router of the dtype of the rows, in the one call that decoder layers make."""
    kernels, rule = kernels_of(build), RouterRule(NUM_EXPERTS, NUM_CHOSEN, is_normalized=True)
    experts = packed(build, experts_of(Codes.UINT4, has_offsets=True))
    drawn = torch.Generator().manual_seed(7)
    router = PackedLinear(kernels, torch.randn(NUM_EXPERTS, HIDDEN_SIZE, generator=drawn).to(dtype))
    mixture = PackedMixture(kernels, router, rule, experts)
    x = torch.randn(9, HIDDEN_SIZE, generator=drawn).to(dtype)
    expected = experts(x, choose_by(kernels, router.floats(x), rule))
    assert torch.equal(mixture(x), expected)
    hidden = x.clone()
    mixture.add_to(hidden, x)
    assert torch.equal(hidden, x + expected)
    assert mixture.counts.sum() == 3 * 9 * NUM_CHOSEN


@needs_compiler
def test_a_model_with_quantized_experts_runs_its_layers_in_one_call_each(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "qwen3_moe", seed=1, num_experts=4, num_experts_per_tok=2)
    decoder = load_decoder(tmp_path, torch.bfloat16, torch.device("cpu"), form=WeightForm("int8"))
    assert all(layer.packed() is not None for layer in decoder.layers)


@needs_compiler
def test_inputs_in_another_order_are_left_to_products_of_each() -> None:
    weights = experts_of(Codes.INT8)
    assert packed_quantized_experts(weights) is not None
    downs = [dataclasses.replace(it, order=torch.arange(SIZE)) for it in weights.downs]
    assert packed_quantized_experts(dataclasses.replace(weights, downs=downs)) is None
