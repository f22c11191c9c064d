"""Experts with quantized weights by the kernels, against those of the dequantized weights in plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from drawn_weights import draw, moved
from launch_recorder import recorded_launches
from torch import Tensor

from workers.model import cuda, native
from workers.model.experts.expert_products import Experts, ExpertWeights, TorchExperts
from workers.model.experts.make_experts import make_quantized_experts
from workers.model.experts.mixture_shape import Clamp, ExpertActivation
from workers.model.experts.quantized_experts import QuantizedExpertWeights
from workers.model.experts.routing import Routing
from workers.model.experts.stack_weights import stack_weights
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight
from workers.model.quantization.stored_format import CodeType, Layout, StoredFormat

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from workers.model.experts.triton_experts import TritonExperts
from workers.model.experts.triton_quantized_experts import TritonQuantizedExperts

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2**-5}
# The interpreter's products of bfloat16 are wrong.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
DTYPES = [torch.float32, HALF]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
modes = pytest.mark.parametrize("is_deterministic", [False, True], ids=["any", "deterministic"])
ACTIVATIONS: tuple[ExpertActivation, ...] = ("silu", "gelu_tanh", "clamped_swiglu")
KERNELS = ["_sort_kernel", "_expert_product_kernel", "_expert_product_kernel", "_add_kernel"]


@pytest.fixture(autouse=True)
def _use_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton serve the device of the tests, and nothing else the CPU."""
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(native, "load", lambda: None)
    if device.type == "cpu":  # there is nothing to compile ahead
        monkeypatch.setattr(TritonQuantizedExperts, "_compile_tiles", lambda *_: None)
    torch.manual_seed(6)


class ExpertForm(NamedTuple):
    """The form of experts' weights, and their sizes. With a `middle`, codes of 8 mean zero."""

    codes: Codes
    group: int
    hidden_size: int
    size: int
    has_offsets: bool = False
    has_middle: bool = False


# Groups that are tiles of inputs, parts of one, or whole rows; in published formats, and in others.
AWQ = ExpertForm(Codes.UINT4, 32, 96, 32, has_offsets=True)
FORMS = {
    "awq": AWQ,
    "int4": ExpertForm(Codes.UINT4, 64, 128, 64, has_middle=True),
    "int4 of columns": ExpertForm(Codes.UINT4, 16, 48, 16, has_middle=True),
    "int8": ExpertForm(Codes.INT8, 40, 40, 40),
    "fp8 in blocks": ExpertForm(Codes.E4M3, 128, 256, 128),
    "nvfp4": ExpertForm(Codes.E2M1, 16, 48, 32),
    "mxfp4": ExpertForm(Codes.E2M1, 32, 96, 64),
    "iq4_nl": ExpertForm(Codes.IQ4_NL, 32, 64, 32),
    "odd groups": ExpertForm(Codes.UINT4, 20, 60, 40, has_offsets=True),
}
# Each in 16 bits, whose tiles have more inputs, and some in 32.
FORMS_AND_DTYPES = [(name, HALF) for name in FORMS] + [
    (name, torch.float32) for name in ("int4", "int8", "mxfp4")
]


def drawn_part(form: ExpertForm, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    weight = draw(form.codes, num_outputs, num_inputs, form.group, has_offsets=form.has_offsets)
    if not form.has_middle:
        return weight
    scales = weight.scales.bfloat16().float()
    return dataclasses.replace(weight, scales=scales, offsets=scales * -8)


def drawn_experts(
    form: ExpertForm, num_experts: int, activation: ExpertActivation = "silu", *, has_bias: bool = False
) -> QuantizedExpertWeights:
    hidden, size = form.hidden_size, form.size
    shapes = (size, hidden), (size, hidden), (hidden, size)
    gates, ups, downs = ([drawn_part(form, *shape) for _ in range(num_experts)] for shape in shapes)
    gate_up_bias = torch.randn(num_experts, 2 * size) * 0.3 if has_bias else None
    down_bias = torch.randn(num_experts, hidden) * 0.3 if has_bias else None
    return QuantizedExpertWeights(
        gates, ups, downs, activation, gate_up_bias, down_bias, Clamp(1.3, 0.7), torch.float32
    )


def experts_on(
    device: torch.device,
    weights: QuantizedExpertWeights,
    dtype: torch.dtype = torch.float32,
    *,
    is_deterministic: bool = False,
) -> Experts:
    """Make the experts on the device."""
    gates, ups, downs = (
        [moved(it, device) for it in of] for of in (weights.gates, weights.ups, weights.downs)
    )
    gate_up_bias, down_bias = (
        None if it is None else it.to(device, dtype) for it in (weights.gate_up_bias, weights.down_bias)
    )
    there = QuantizedExpertWeights(
        gates, ups, downs, weights.activation, gate_up_bias, down_bias, weights.clamp, dtype
    )
    return make_quantized_experts(there, is_deterministic=is_deterministic)


def routing_of(num_tokens: int, num_experts: int, num_chosen: int, share_of_none: float = 0.0) -> Routing:
    """Draw other experts for each token, of which some are not of this rank, and unequal weights."""
    rows = [torch.randperm(num_experts)[:num_chosen] for _ in range(num_tokens)]
    experts = torch.stack(rows).int()
    experts[torch.rand(experts.shape) < share_of_none] = -1
    return Routing(experts, torch.rand(experts.shape) + 0.1)


def check(actual: Tensor, weights: QuantizedExpertWeights, x: Tensor, routing: Routing) -> None:
    """Compare with the experts of torch, of the weights and biases as the dtype of x has them."""
    gates, ups, downs = (
        [it.dequantized() for it in of] for of in (weights.gates, weights.ups, weights.downs)
    )
    gate_up_bias, down_bias = (
        None if it is None else it.to(x.dtype).float() for it in (weights.gate_up_bias, weights.down_bias)
    )
    exact = ExpertWeights(gates, ups, downs, weights.activation, gate_up_bias, down_bias, weights.clamp)
    expected = TorchExperts(exact)(x.cpu().float(), Routing(*(it.cpu() for it in routing)))
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "dtype"), FORMS_AND_DTYPES, ids=str)
def test_sums_are_those_of_dequantized_weights(device: torch.device, name: str, dtype: torch.dtype) -> None:
    number = list(FORMS).index(name)
    form, is_deterministic = FORMS[name], number % 2 == 1
    weights = drawn_experts(form, 3, ACTIVATIONS[number % 3], has_bias=number % 2 == 0)
    experts = experts_on(device, weights, dtype, is_deterministic=is_deterministic)
    assert isinstance(experts, TritonQuantizedExperts)
    assert (experts.num_experts, experts.hidden_size) == (3, form.hidden_size)
    assert experts.counts.tolist() == [0, 0, 0]
    x = torch.randn(5, form.hidden_size).to(device, dtype)
    routing = Routing(*(it.to(device) for it in routing_of(5, 3, 2)))
    actual = experts(x, routing)
    assert actual.dtype == dtype
    check(actual, weights, x, routing)
    assert experts.counts.tolist() == torch.bincount(routing.experts.flatten().cpu(), minlength=3).tolist()
    hidden = torch.ones_like(x)
    experts.add_to(hidden, x, routing)
    assert torch.equal(hidden, torch.ones_like(x) + actual)


@dtypes
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"), [(40, 1, 1), (20, 4, 4), (40, 6, 2), (150, 1, 1)]
)
def test_drawn_numbers_of_rows(
    device: torch.device, dtype: torch.dtype, num_tokens: int, num_experts: int, num_chosen: int
) -> None:
    """With experts of other ranks, and with as many rows as have the tiles of some and of many."""
    if num_tokens > 128 and dtype == torch.float32:
        pytest.skip("all numbers of rows have one tile")
    seed = num_tokens + num_experts
    weights = drawn_experts(AWQ, num_experts, ACTIVATIONS[seed % 3], has_bias=True)
    experts = experts_on(device, weights, dtype)
    x = torch.randn(num_tokens, AWQ.hidden_size).to(device, dtype)
    routing = routing_of(num_tokens, num_experts, num_chosen, 0.3 * (seed % 2))
    there = Routing(*(it.to(device) for it in routing))
    check(experts(x, there), weights, x, routing)


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 1], [0, 1], [1, 0]],  # two experts without rows
        [[2, -1]] * 40,  # all on one
        [[-1, -1]] * 3,  # none at all
        [[3, 2]],
    ],
    ids=["some", "one", "none", "alone"],
)
@modes
def test_rows_on_few_experts(device: torch.device, is_deterministic: bool, rows: list[list[int]]) -> None:
    weights = drawn_experts(AWQ, 4)
    x = torch.randn(len(rows), AWQ.hidden_size).to(device)
    routing = Routing(
        torch.tensor(rows, dtype=torch.int32, device=device), torch.rand(len(rows), 2).to(device)
    )
    experts = experts_on(device, weights, is_deterministic=is_deterministic)
    check(experts(x, routing), weights, x, routing)
    none = Routing(*(it[:0] for it in routing))
    assert experts(x[:0], none).shape == (0, AWQ.hidden_size)


@dtypes
def test_a_token_has_the_same_bits_in_any_company(device: torch.device, dtype: torch.dtype) -> None:
    """In deterministic mode whatever the number of tokens; otherwise where experts have few rows each."""
    form = AWQ._replace(hidden_size=64)
    weights = drawn_experts(form, 2, "clamped_swiglu", has_bias=True)
    x = torch.randn(36, form.hidden_size).to(device, dtype)
    routing = Routing(*(it.to(device) for it in routing_of(36, 2, 2, 0.1)))
    for is_deterministic, num_tokens in ((True, 36), (False, 16)):
        experts = experts_on(device, weights, dtype, is_deterministic=is_deterministic)
        parts = [
            Routing(*(it[first:end].clone() for it in routing)) for first, end in ((0, num_tokens), (3, 4))
        ]
        whole = experts(x[:num_tokens], parts[0])
        assert not bool(whole.isnan().any())
        assert torch.equal(experts(x[3:4], parts[1]), whole[3:4])


@modes
def test_a_nan_spoils_its_token_only(device: torch.device, is_deterministic: bool) -> None:
    weights = drawn_experts(AWQ, 3)
    x = torch.randn(9, AWQ.hidden_size).to(device, HALF)
    routing = Routing(*(it.to(device) for it in routing_of(9, 3, 2)))
    experts = experts_on(device, weights, HALF, is_deterministic=is_deterministic)
    clean = experts(x, routing)
    x[7, 5] = float("nan")
    spoilt = experts(x, routing)
    assert bool(spoilt[7].isnan().all())
    spoilt[7] = clean[7]
    assert torch.equal(spoilt, clean)


@pytest.mark.parametrize("num_tokens", [1, 60])
def test_all_experts_are_four_launches(device: torch.device, num_tokens: int) -> None:
    """Neither with few rows nor with many does anything wait for the host."""
    experts = experts_on(device, drawn_experts(AWQ, 2), HALF)
    x = torch.randn(num_tokens, AWQ.hidden_size).to(device, HALF)
    routing = Routing(*(it.to(device) for it in routing_of(num_tokens, 2, 1)))
    with recorded_launches() as launches:
        experts.add_to(x, x.clone(), routing)
    assert launches[-4:] == KERNELS
    assert launches[:-4] == ["aten::clone"]


def test_experts_without_gates(device: torch.device) -> None:
    drawn = drawn_experts(AWQ, 3, "relu2")
    weights = dataclasses.replace(drawn, gates=[])
    x, routing = torch.randn(5, AWQ.hidden_size), routing_of(5, 3, 2)
    there = Routing(*(it.to(device) for it in routing))
    experts = experts_on(device, weights)
    assert isinstance(experts, TritonQuantizedExperts)
    check(experts(x.to(device), there), weights, x, routing)


def test_inputs_are_not_rounded(device: torch.device) -> None:
    """Although the checkpoint means that."""
    weights = drawn_experts(FORMS["int8"], 2)
    rounding = dataclasses.replace(
        weights, gates=_rounding(weights.gates), ups=_rounding(weights.ups), downs=_rounding(weights.downs)
    )
    x, routing = torch.randn(3, 40), routing_of(3, 2, 1)
    there = Routing(*(it.to(device) for it in routing))
    check(experts_on(device, rounding)(x.to(device), there), weights, x, routing)


def _rounding(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    return [dataclasses.replace(it, quantizes_inputs=True) for it in weights]


@pytest.mark.parametrize("kind", ["codes", "order"])
def test_experts_of_several_forms_are_dequantized(device: torch.device, kind: str) -> None:
    """The host does not see which are chosen, and one kernel computes all."""
    weights = drawn_experts(AWQ, 3)
    downs = list(weights.downs)
    if kind == "order":
        downs[2] = dataclasses.replace(downs[2], order=torch.randperm(AWQ.size))
    else:
        downs[2] = draw(Codes.INT8, AWQ.hidden_size, AWQ.size, 32)
    weights = dataclasses.replace(weights, downs=downs)
    experts = experts_on(device, weights)
    assert isinstance(experts, TritonExperts)
    x, routing = torch.randn(4, AWQ.hidden_size), routing_of(4, 3, 2)
    there = Routing(*(it.to(device) for it in routing))
    check(experts(x.to(device), there), weights, x, routing)


def test_scales_and_offsets_take_the_least_memory() -> None:
    """Where that is exact: scales in 16 bits, and no offsets where 8 means zero in all groups. So much is
    counted for a rank."""
    middle = drawn_experts(FORMS["int4"], 2)
    stack = stack_weights((middle.gates, middle.ups))
    assert stack is not None
    assert (stack.offsets, stack.has_middle, stack.scales.dtype) == (None, True, torch.bfloat16)
    counted = StoredFormat(Layout.PACKED, CodeType.INT4, 64).bytes_each
    assert stack.num_bytes == counted * 2 * (64 + 64) * 128
    offsets = drawn_experts(AWQ, 2)
    stack = stack_weights((offsets.downs,))
    assert stack is not None
    assert (stack.has_middle, stack.scales.dtype) == (False, torch.float32)
    expected = offsets.downs[1].offsets
    assert stack.offsets is not None
    assert expected is not None
    assert torch.equal(stack.offsets[1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["awq", "mxfp4"])
def test_a_graph_holds_the_experts(device: torch.device, name: str) -> None:
    """Whatever experts the tokens of its replays choose."""
    form = FORMS[name]
    experts = experts_on(device, drawn_experts(form, 4), HALF)
    x = torch.randn(3, form.hidden_size).to(device, HALF)
    routing = Routing(*(it.to(device) for it in routing_of(3, 4, 2)))
    experts(x, routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(x, routing)
    for _ in range(3):
        x.copy_(torch.randn(3, form.hidden_size))
        routing.experts.copy_(routing_of(3, 4, 2).experts)
        graph.replay()
        assert torch.equal(captured.clone(), experts(x, routing))
