"""Products with packed weights, by every instruction set of this CPU, against float64; those of torch beside
them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import EMULATED, isa_marks, kernels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_programs import needs_compiler
from torch import Tensor

from workers.model import native
from workers.model.make_linear import make_linear
from workers.model.native.isa import Isa, available_isas
from workers.model.products import GatedActivation, Linear, PackedLinear, TorchLinear, Workspace

DTYPES = [torch.float32, torch.bfloat16]
MOST_ROWS = 70


class Build(NamedTuple):
    """An instruction set and the macros that the kernels are compiled with."""

    isa: Isa
    defines: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.isa.value} with emulated amx" if self.defines else self.isa.value

    def kernels(self) -> native.Kernels:
        return kernels_of(self.isa, *self.defines)


# In the slow tests AMX tiles are emulated beside the least instruction set of this CPU, and the best.
BUILDS = [
    *(pytest.param(Build(isa, ()), marks=isa_marks(isa)) for isa in available_isas()),
    *(
        pytest.param(Build(isa, (EMULATED,)), marks=pytest.mark.slow)
        for isa in dict.fromkeys((*available_isas()[-1:], *available_isas()[:1]))
    ),
]
builds = pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class Problem(NamedTuple):
    """A product and its result in float64; `scale` is the sum of the absolute values of its terms."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    exact: Tensor
    scale: Tensor


def problem(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, *, has_bias: bool = False
) -> Problem:
    generator = torch.Generator().manual_seed(num_rows * 7 + num_outputs * 3 + num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    scale = F.linear(x.double().abs(), weight.double().abs()) + 1
    return Problem(x, weight, bias, exact, scale)


def check(actual: Tensor, problem: Problem) -> None:
    """Float32 sums of that many terms are off by some units of their last place."""
    assert actual.dtype == torch.float32
    error = ((actual - problem.exact).abs() / problem.scale).max().item()
    assert error < 1e-6, error


@builds
@dtypes
@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, MOST_ROWS),
    num_outputs=st.integers(1, 150),
    num_inputs=st.one_of(st.integers(1, 160), st.sampled_from([256, 544, 1030])),
    has_bias=st.booleans(),
)
def test_every_shape_is_right(
    build: Build, dtype: torch.dtype, num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool
) -> None:
    given_problem = problem(num_rows, num_outputs, num_inputs, dtype, has_bias=has_bias)
    x, weight, bias, _, _ = given_problem
    linear = PackedLinear(build.kernels(), weight, bias)
    sums = linear.floats(x)
    check(sums, given_problem)
    assert torch.equal(linear(x), sums.to(dtype)), "rounded once"
    hidden = torch.linspace(-3, 3, num_rows * num_outputs).view(num_rows, -1).to(dtype)
    expected = hidden + sums.to(dtype)
    linear.add_to(hidden, x)
    assert torch.equal(hidden, expected)
    ids = torch.tensor([0, num_outputs - 1, num_outputs // 2])
    assert torch.equal(linear.lookup(ids), weight[ids])


@builds
@dtypes
@pytest.mark.parametrize("sizes", [(64, 32, 32), (40, 24, 8), (1, 2), (32, 5, 31), (96,)])
def test_parts_are_packed_one_after_another(build: Build, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Also parts that are columns of a wider matrix, as a rank's share of a row-split weight is."""
    x, weight, bias, _, _ = problem(3, sum(sizes), 70, dtype, has_bias=True)
    whole = PackedLinear(build.kernels(), weight, bias)
    parts = [part.repeat(1, 2)[:, 70:] for part in torch.split(weight, list(sizes))]
    assert torch.equal(PackedLinear(build.kernels(), parts, bias)(x), whole(x))
    gate, up = weight[: sum(sizes) // 2], weight[-(sum(sizes) // 2) :]
    gated = PackedLinear(build.kernels(), [gate, up], gate="silu")
    joined = PackedLinear(build.kernels(), torch.cat((gate, up)), gate="silu")
    assert torch.equal(gated.gated(x), joined.gated(x))


@builds
@dtypes
@pytest.mark.parametrize("shape", [(96, 64), (33, 31), (160, 1056), (2048, 64)])
def test_a_rows_result_depends_on_nothing_beside_it(
    build: Build, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """However many rows there are, wherever the row is, and however many threads share the work."""
    x, weight, _, _, _ = problem(MOST_ROWS, *shape, dtype)
    linear = PackedLinear(build.kernels(), weight)
    torch.set_num_threads(1)
    alone = torch.cat([linear.floats(row[None]) for row in x])
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        for num_rows in (*range(1, 27), 49, MOST_ROWS):
            for first in (0, MOST_ROWS - num_rows):
                rows = slice(first, first + num_rows)
                assert torch.equal(linear.floats(x[rows]), alone[rows]), (num_threads, num_rows, first)
    many = x.repeat(18, 1)  # more than are computed at a time
    assert torch.equal(linear.floats(many), alone.repeat(18, 1))


@builds
@dtypes
@pytest.mark.parametrize("num_outputs", [20, 33, 70])
def test_threads_share_rows_and_panels_whatever_their_numbers(
    build: Build, dtype: torch.dtype, num_outputs: int
) -> None:
    """Around the numbers of rows from which a thread keeps its own, and that are computed at a time."""
    x, weight, bias, _, _ = problem(1025, num_outputs, 64, dtype)
    linear = PackedLinear(build.kernels(), weight, bias)
    torch.set_num_threads(1)
    alone = linear(x)
    for num_threads in (2, 3, 4, 7):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 2, 13, 191, 192, 193, 289, 1023, 1024, 1025):
            assert torch.equal(linear(x[:num_rows]), alone[:num_rows]), (num_threads, num_rows)


@builds
@dtypes
@pytest.mark.parametrize("size", [32, 48, 7, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gate_and_up_become_one(
    build: Build, dtype: torch.dtype, size: int, has_bias: bool, gate: GatedActivation
) -> None:
    x, weight, bias, _, _ = problem(21, 2 * size, 64, dtype, has_bias=has_bias)
    linear = PackedLinear(build.kernels(), weight, bias, gate=gate)
    actual = linear.gated(x)
    gates, ups = PackedLinear(build.kernels(), weight, bias)(x).double().chunk(2, dim=1)
    expected = (exact_activation(gates, gate).to(dtype) * ups.to(dtype)).to(dtype)
    assert actual.shape == expected.shape
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=2e-6 if gate == "silu" else 1e-5, atol=1e-7)
    else:
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-6)
        # Gates of this test reach -30, of which GeLU is less than what bfloat16 is exact for.
        least = 0.99 if gate == "silu" else 0.98
        assert (actual == expected).float().mean() > least, "only ties of rounding may differ"


@builds
@dtypes
@pytest.mark.parametrize("size", [32, 7, 33])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_the_gate_of_two_products_is_that_of_one(
    build: Build, dtype: torch.dtype, size: int, gate: GatedActivation
) -> None:
    """Bit for bit, in whatever place of the tensor a row is."""
    x, weight, bias, _, _ = problem(21, 2 * size, 64, dtype, has_bias=False)
    expected = PackedLinear(build.kernels(), weight, bias, gate=gate).gated(x)
    gates, ups = PackedLinear(build.kernels(), weight, bias)(x).chunk(2, dim=1)
    actual = build.kernels().gate_mul(gates, ups, is_gelu=gate == "gelu_tanh")
    assert actual is gates
    assert torch.equal(actual, expected)


def exact_activation(gates: torch.Tensor, gate: GatedActivation) -> torch.Tensor:
    """The activation in float64. Far below 0, the tanh of GeLU's approximation cancels even there, and the
    same value is that of a sigmoid."""
    if gate == "silu":
        return F.silu(gates)
    doubled = 2 * math.sqrt(2 / math.pi) * (gates + 0.044715 * gates**3)
    return torch.where(gates < -4, gates * torch.sigmoid(doubled), F.gelu(gates, approximate="tanh"))


@builds
@dtypes
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_activations_at_their_ends(build: Build, dtype: torch.dtype, gate: GatedActivation) -> None:
    sizes = (80, 86, 87, 89, 100, 126, 128, 176.5, 1e3, 1e4, 1e30)
    gates = torch.tensor([0.0, -0.0, 1e-30, *sizes, *(-size for size in sizes), float("nan")]).to(dtype)[
        :, None
    ]
    alone = PackedLinear(
        build.kernels(),
        torch.tensor([[1.0, 0.0], [0.0, 0.0]]).to(dtype),
        torch.tensor([0.0, 1.0]).to(dtype),
        gate=gate,
    )
    actual, expected = alone.gated(F.pad(gates, (0, 1))), exact_activation(gates.double(), gate).to(dtype)
    # What is less than that is 0, which torch's own kernels round as they like.
    rtol = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-35, equal_nan=True)
    zeros, infinite = torch.zeros(2, 1).to(dtype), torch.tensor([float("inf"), 1.0]).to(dtype)
    of_infinity = PackedLinear(build.kernels(), zeros, infinite, gate=gate)
    assert of_infinity.gated(zeros[:1]).item() == float("inf")


@builds
@dtypes
def test_rows_that_lie_apart_and_results_beside_others(build: Build, dtype: torch.dtype) -> None:
    x, weight, _, _, _ = problem(9, 40, 64, dtype)
    linear = PackedLinear(build.kernels(), weight)
    wide = torch.full((9, 100), 5.0, dtype=dtype)
    wide[:, 20:84] = x
    out = torch.full((9, 50), 7.0, dtype=dtype)
    linear(wide[:, 20:84], out[:, 3:43])
    assert torch.equal(out[:, 3:43], linear(x))
    assert bool((out[:, :3] == 7.0).all())
    assert bool((out[:, 43:] == 7.0).all()), "nothing else was written"


@builds
@dtypes
def test_a_nan_spoils_its_row_only(build: Build, dtype: torch.dtype) -> None:
    x, weight, _, _, _ = problem(25, 64, 96, dtype)
    linear = PackedLinear(build.kernels(), weight)
    clean = linear(x)
    x[7, 5] = float("nan")
    spoilt = linear(x)
    assert bool(spoilt[7].isnan().all())
    spoilt[7] = clean[7]
    assert torch.equal(spoilt, clean)


@dtypes
def test_the_torch_product_is_the_same_up_to_rounding(dtype: torch.dtype) -> None:
    x, weight, bias, _, _ = problem(9, 48, 64, dtype, has_bias=True)
    plain: Linear = TorchLinear(weight, bias)
    packed = make_linear(weight, bias, gate="silu")
    assert isinstance(packed, PackedLinear)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(plain.gated(x), packed.gated(x), rtol=tolerance, atol=tolerance)
    packed = make_linear(weight, bias)
    torch.testing.assert_close(plain(x), packed(x), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(plain.floats(x), packed.floats(x), rtol=tolerance, atol=10 * tolerance)
    for product in (plain, TorchLinear(weight)):
        hidden = torch.ones(9, 48, dtype=dtype)
        rest = product.add_to(hidden, x)
        total = hidden if rest is None else hidden + rest
        torch.testing.assert_close(total, product(x) + 1, rtol=tolerance, atol=tolerance)
    out = torch.empty(9, 48, dtype=dtype)
    assert plain(x, out) is out
    assert torch.equal(out, plain(x))
    assert torch.equal(plain.lookup(torch.tensor([3])), packed.lookup(torch.tensor([3])))


def test_other_dtypes_are_left_to_torch() -> None:
    assert isinstance(make_linear(torch.zeros(4, 4, dtype=torch.float16)), TorchLinear)
    assert isinstance(make_linear(torch.zeros(4, 4, device="meta")), TorchLinear)


def test_the_scratch_of_a_step_is_kept() -> None:
    workspace = Workspace()
    rows = torch.zeros(6, 2)
    first = workspace.take("a", rows, 5)
    assert first.shape == (6, 5)
    assert workspace.take("a", rows[:2], 5).data_ptr() == first.data_ptr()
    assert workspace.take("b", rows, 5).data_ptr() != first.data_ptr()
    assert workspace.take("a", rows.bfloat16(), 5).dtype == torch.bfloat16
