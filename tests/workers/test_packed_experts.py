"""Experts with packed weights, by every instruction set of this CPU, against those of torch in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import TILED_KERNELS, kernels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_programs import needs_compiler
from torch import Tensor

from workers.errors import WorkerError
from workers.model.experts.expert_products import ExpertWeights, TorchExperts
from workers.model.experts.make_experts import make_experts
from workers.model.experts.mixture_shape import Clamp, ExpertActivation
from workers.model.experts.native_routing import choose_by
from workers.model.experts.packed_experts import PackedExperts
from workers.model.experts.packed_mixture import PackedMixture
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing
from workers.model.products import PackedLinear

DTYPES = [torch.float32, torch.bfloat16]
ACTIVATIONS: tuple[ExpertActivation, ...] = get_args(ExpertActivation)
builds = pytest.mark.parametrize("build", TILED_KERNELS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def drawn_weights(
    num_experts: int,
    hidden_size: int,
    size: int,
    dtype: torch.dtype,
    activation: ExpertActivation = "silu",
    *,
    has_bias: bool = False,
) -> ExpertWeights:
    """Draw weights whose gates and ups are of the size of the inputs, and so are limits of clamps."""
    generator = torch.Generator().manual_seed(num_experts * 7 + hidden_size * 3 + size)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).mul_(2 / sizes[-1] ** 0.5).to(dtype)

    # Rows that lie apart, as those of a tensor of gates and ups in turn.
    gate_up, is_gated = drawn(num_experts, 2 * size, hidden_size), activation != "relu2"
    return ExpertWeights(
        list(gate_up[:, ::2]) if is_gated else (),
        list(gate_up[:, 1::2]),
        list(drawn(num_experts, hidden_size, size)),
        activation,
        drawn(num_experts, 2 * size) if has_bias and is_gated else None,
        drawn(num_experts, hidden_size) if has_bias else None,
    )


def doubled(weights: ExpertWeights) -> ExpertWeights:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value.double()
        elif isinstance(value, list):
            changes[field.name] = [tensor.double() for tensor in value]
    return dataclasses.replace(weights, **changes)


def drawn_routing(num_rows: int, num_experts: int, num_chosen: int, seed: int = 0) -> Routing:
    """Draw different experts for each row, in any order."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :num_chosen].int()
    return Routing(experts, torch.rand(num_rows, num_chosen, generator=generator))


def drawn_rows(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)).to(dtype)


def check(actual: Tensor, weights: ExpertWeights, x: Tensor, routing: Routing) -> None:
    """Compare with float64: sums are off by some units in the last place of the sum of what bounds their
    terms, since up to six values are rounded one after another."""
    assert actual.dtype == x.dtype
    wide = doubled(weights)
    exact = TorchExperts(wide)(x.double(), routing)
    scale = torch.ones_like(exact)
    gates_or_ups = wide.gates or wide.ups  # where there are no gates, ups are squared
    for expert, (gate, up, down) in enumerate(zip(gates_or_ups, wide.ups, wide.downs, strict=True)):
        bias = None if wide.gate_up_bias is None else wide.gate_up_bias[expert]
        gates, ups = F.linear(x.double(), torch.cat((gate, up)), bias).abs().chunk(2, dim=1)
        results = (gates * (ups + 1)) @ down.t().abs()
        scale += results * (routing.weights * (routing.experts == expert)).sum(1, keepdim=True)
    error = ((actual - exact).abs() / scale.amax(1, keepdim=True)).max().item()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 2**-6}[x.dtype], error


@builds
@dtypes
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_shape_is_right(build: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """With experts that have no rows, one that has all, and rows that leave out some or all of theirs."""
    draw = data.draw
    num_experts = draw(st.integers(1, 7))
    num_chosen = draw(st.integers(1, num_experts))
    num_rows = draw(st.one_of(st.integers(1, 24), st.integers(25, 300)))
    hidden_size, size = draw(st.integers(1, 130)), draw(st.one_of(st.integers(1, 70), st.just(96)))
    activation, has_bias = draw(st.sampled_from(ACTIVATIONS)), draw(st.booleans())
    weights = drawn_weights(num_experts, hidden_size, size, dtype, activation, has_bias=has_bias)
    routing = drawn_routing(num_rows, num_experts, num_chosen, draw(st.integers(0, 9)))
    routing.experts[torch.rand(routing.experts.shape) < draw(st.sampled_from([0, 0.3, 1]))] = -1
    if draw(st.booleans()):
        routing.experts[:, 0] = num_experts - 1
        routing.experts[:, 1:] = -1
    x = drawn_rows(num_rows, hidden_size, dtype)
    packed = PackedExperts(kernels_of(build), weights)
    actual = packed(x, routing)
    check(actual, weights, x, routing)
    assert bool((actual[(routing.experts < 0).all(1)] == 0).all())
    hidden = drawn_rows(num_rows, hidden_size, dtype)
    expected = hidden + actual
    packed.add_to(hidden, x, routing)
    assert torch.equal(hidden, expected), "rounded before it is added"


@builds
@dtypes
def test_streams_of_weights_that_are_cut_are_right(build: str, dtype: torch.dtype) -> None:
    """Panels that are larger than what is prefetched of them, of few rows and of more."""
    hidden_size, size = 1088, 1056
    weights = drawn_weights(3, hidden_size, size, dtype, has_bias=True)
    packed = PackedExperts(kernels_of(build), weights)
    x, routing = drawn_rows(24, hidden_size, dtype), drawn_routing(24, 3, 2)
    whole = packed(x, routing)
    check(whole, weights, x, routing)
    for num_rows in (1, 2, 5):
        first = Routing(*(tensor[:num_rows] for tensor in routing))
        assert torch.equal(packed(x[:num_rows], first), whole[:num_rows])


@builds
@dtypes
@pytest.mark.parametrize("shape", [(64, 64), (33, 31), (96, 48)])
def test_a_rows_result_depends_on_nothing_beside_it(
    build: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """However many rows there are, wherever the row is, in whatever order its experts are named, and however
    many threads share the work."""
    num_rows, num_experts = 700, 5
    packed = PackedExperts(kernels_of(build), drawn_weights(num_experts, *shape, dtype, has_bias=True))
    x, routing = drawn_rows(num_rows, shape[0], dtype), drawn_routing(num_rows, num_experts, 3)
    routing.experts[::7, 1] = -1
    torch.set_num_threads(1)
    alone = torch.cat(
        [packed(x[i : i + 1], Routing(*(tensor[i : i + 1] for tensor in routing))) for i in range(num_rows)]
    )
    turned = Routing(*(tensor.flip(1) for tensor in routing))
    for num_threads in (1, 2, 5, 16):
        torch.set_num_threads(num_threads)
        for size in (1, 2, 7, 13, 40, 200, num_rows):
            for first in (0, num_rows - size):
                rows = slice(first, first + size)
                result = packed(x[rows], Routing(*(tensor[rows] for tensor in turned)))
                assert torch.equal(result, alone[rows]), (num_threads, size, first)


@builds
@dtypes
def test_more_rows_than_are_computed_at_a_time(build: str, dtype: torch.dtype) -> None:
    """All of them on one expert beside others, whose rows many threads share."""
    packed = PackedExperts(kernels_of(build), drawn_weights(3, 16, 20, dtype))
    x, routing = drawn_rows(4100, 16, dtype), drawn_routing(4100, 3, 1)
    routing.experts[:4000] = 2
    torch.set_num_threads(1)
    parts = [
        packed(x[i : i + 100], Routing(*(tensor[i : i + 100] for tensor in routing)))
        for i in range(0, 4100, 100)
    ]
    of_parts = packed.counts.clone()
    torch.set_num_threads(7)
    assert torch.equal(packed(x, routing), torch.cat(parts))
    expected = torch.bincount(routing.experts.flatten(), minlength=3)
    assert torch.equal(of_parts, expected)
    assert torch.equal(packed.counts, 2 * expected)


@builds
@dtypes
@pytest.mark.parametrize("limit", [7.0, 0.3])
def test_a_clamped_gate_at_its_ends(build: str, dtype: torch.dtype, limit: float) -> None:
    """Gates and ups are the biases of as many experts."""
    sizes = (0.1, 0.29, 0.31, 1.0, 6.9, 7.1, 60.0, 1e4, 1e30)
    ends = torch.tensor([0.0, *sizes, *(-size for size in sizes), float("nan"), float("inf")])
    biases = torch.cartesian_prod(ends, ends).to(dtype)
    num_experts = len(biases)
    zeros, ones = (
        [torch.zeros(1, 2, dtype=dtype)] * num_experts,
        [torch.ones(2, 1, dtype=dtype)] * num_experts,
    )
    weights = ExpertWeights(
        list(zeros), list(zeros), list(ones), "clamped_swiglu", biases, clamp=Clamp(1.5, limit)
    )
    routing = Routing(torch.arange(num_experts).int()[:, None], torch.ones(num_experts, 1))
    x = torch.zeros(num_experts, 2, dtype=dtype)
    actual = PackedExperts(kernels_of(build), weights)(x, routing)
    expected = TorchExperts(doubled(weights))(x.double(), routing).to(dtype)
    tolerance = 3e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-6, equal_nan=True)


@builds
@dtypes
def test_a_nan_spoils_its_row_only(build: str, dtype: torch.dtype) -> None:
    packed = PackedExperts(kernels_of(build), drawn_weights(4, 64, 32, dtype))
    x, routing = drawn_rows(25, 64, dtype), drawn_routing(25, 4, 2)
    clean = packed(x, routing)
    x[7, 5] = float("nan")
    spoilt = packed(x, routing)
    assert bool(spoilt[7].isnan().all())
    spoilt[7] = clean[7]
    assert torch.equal(spoilt, clean)


@builds
@dtypes
def test_rows_that_lie_apart_and_results_beside_others(build: str, dtype: torch.dtype) -> None:
    packed = PackedExperts(kernels_of(build), drawn_weights(4, 40, 32, dtype))
    x, routing = drawn_rows(9, 40, dtype), drawn_routing(9, 4, 2)
    wide, hidden = torch.full((9, 90), 5.0, dtype=dtype), torch.full((9, 50), 7.0, dtype=dtype)
    wide[:, 20:60] = x
    packed.add_to(hidden[:, 3:43], wide[:, 20:60], routing)
    assert torch.equal(hidden[:, 3:43], packed(x, routing) + 7)
    assert bool((hidden[:, :3] == 7.0).all())
    assert bool((hidden[:, 43:] == 7.0).all()), "nothing else was written"
    columns = x.t().contiguous().t()
    turned = Routing(*(tensor.t().contiguous().t() for tensor in routing))
    assert torch.equal(packed(columns, turned), packed(x, routing))


@builds
@dtypes
@pytest.mark.parametrize("router_dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 9, 300])
def test_a_mixture_is_its_router_and_its_experts(
    build: str, dtype: torch.dtype, router_dtype: torch.dtype, num_rows: int
) -> None:
    """Bit for bit, with a router of the experts' dtype or of float32."""
    kernels = kernels_of(build)
    rule = RouterRule(9, 3, "sigmoid", is_normalized=True, scale=2.5, num_groups=3, num_chosen_groups=2)
    experts = PackedExperts(kernels, drawn_weights(9, 64, 32, dtype))
    router_dtype = torch.float32 if dtype == torch.float32 else router_dtype
    router = PackedLinear(kernels, drawn_rows(9, 64, router_dtype))
    bias = torch.linspace(-0.2, 0.2, 9)
    mixture = PackedMixture(kernels, router, rule, experts, bias)
    x = drawn_rows(num_rows, 64, dtype)
    routing = choose_by(kernels, router.floats(x.to(router_dtype)), rule, bias)
    expected = experts(x, routing)
    of_one = torch.bincount(routing.experts.flatten(), minlength=9)
    assert torch.equal(experts.counts, of_one)
    assert torch.equal(mixture(x), expected)
    assert torch.equal(mixture.counts, 2 * of_one)
    hidden = x.clone()
    mixture.add_to(hidden, x)
    assert torch.equal(hidden, x + expected)
    assert torch.equal(mixture.counts, 3 * of_one)


@dtypes
def test_experts_are_packed_where_there_are_kernels(dtype: torch.dtype) -> None:
    weights = drawn_weights(2, 8, 4, dtype)
    assert isinstance(make_experts(weights), PackedExperts)
    assert isinstance(make_experts(weights, is_deterministic=True), PackedExperts)
    halves = drawn_weights(2, 8, 4, torch.float16)
    assert isinstance(make_experts(halves), TorchExperts)
    with pytest.raises(WorkerError, match="deterministic: there are no such products of float16"):
        make_experts(halves, is_deterministic=True)
