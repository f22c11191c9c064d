"""Products with quantized weights, by every instruction set of this CPU and by torch, against the dequantized
weight in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import TILED_KERNELS, kernels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_programs import needs_compiler
from torch import Tensor

from workers.model.make_linear import make_linear
from workers.model.products import GatedActivation, Linear, gate_mul
from workers.model.quantization.packed_codes import PackedForm, ScaleKind
from workers.model.quantization.packed_product import PackedQuantizedLinear
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight
from workers.model.quantization.torch_product import DequantizingLinear

DTYPES = (torch.float32, torch.bfloat16)
MOST_ROWS = 60

builds = pytest.mark.parametrize("build", TILED_KERNELS)
all_codes = pytest.mark.parametrize("codes", Codes, ids=lambda codes: codes.value)


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class Shape(NamedTuple):
    """The sizes of a weight."""

    num_outputs: int
    num_inputs: int
    group: int


# Groups of a few steps, of several together, of more than are decoded together, and rows that end within
# a step.
SHAPES = (
    Shape(70, 64, 16),
    Shape(33, 288, 32),
    Shape(40, 384, 64),
    Shape(96, 512, 128),
    Shape(64, 768, 256),
    Shape(32, 640, 640),
    Shape(5, 1002, 1002),
    Shape(31, 12, 12),
)
shapes = st.sampled_from(SHAPES)


def made(
    codes: Codes, shape: Shape, seed: int = 0, *, has_offsets: bool = False, has_order: bool = False
) -> QuantizedWeight:
    """Draw all codes but those of NaN, and scales that no 16 bits hold."""
    drawn = torch.Generator().manual_seed(seed)
    num_outputs, num_inputs, group = shape
    size = num_outputs, num_inputs * codes.num_bits // 8
    packed = torch.randint(0, 256, size, generator=drawn, dtype=torch.uint8)
    if codes is Codes.E4M3:
        packed[packed & 0x7F == 0x7F] = 0x7E
    scales = torch.rand(num_outputs, num_inputs // group, generator=drawn) + 0.1
    offsets = torch.randn(scales.shape, generator=drawn) if has_offsets else None
    order = torch.randperm(num_inputs, generator=drawn) if has_order else None
    return QuantizedWeight(codes, packed, scales, group, offsets, order)


def rows_of(num_rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    drawn = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, weight.num_inputs, generator=drawn).to(dtype)


def packed(
    build: str, weight: QuantizedWeight, bias: Tensor | None = None, gate: GatedActivation | None = None
) -> PackedQuantizedLinear:
    form = PackedForm.of([weight])
    assert form is not None
    return PackedQuantizedLinear(kernels_of(build), weight, form, bias, gate=gate)


def check(actual: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
    """Compare float32 sums, which are off by some units of the last place of the sum of what was added: codes
    by scales, and offsets, which may cancel each other."""
    exact = F.linear(x.double(), weight.dequantized().double(), None if bias is None else bias.double())
    without = dataclasses.replace(weight, offsets=None).dequantized().double().abs()
    scale = F.linear(x.double().abs(), without) + 1
    if weight.offsets is not None:
        widths = weight.offsets.double().abs().repeat_interleave(weight.group, 1)
        scale += F.linear(x.double().abs().sum(1, keepdim=True), widths.amax(1, keepdim=True))
    assert actual.dtype == torch.float32
    error = ((actual - exact).abs() / scale).max().item()
    assert error < 1e-6, error


@builds
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@settings(max_examples=30, deadline=None)
@given(
    codes=st.sampled_from(Codes),
    shape=shapes,
    num_rows=st.integers(1, MOST_ROWS),
    has_offsets=st.booleans(),
    has_order=st.booleans(),
    has_bias=st.booleans(),
)
def test_every_form_is_multiplied(
    build: str,
    dtype: torch.dtype,
    codes: Codes,
    shape: Shape,
    num_rows: int,
    has_offsets: bool,
    has_order: bool,
    has_bias: bool,
) -> None:
    weight = made(codes, shape, has_offsets=has_offsets, has_order=has_order)
    bias = torch.randn(shape.num_outputs).to(dtype) if has_bias else None
    x = rows_of(num_rows, weight, dtype)
    linear = packed(build, weight, bias)
    sums = linear.floats(x)
    check(sums, x, weight, bias)
    assert torch.equal(linear(x), sums.to(dtype)), "rounded once"
    hidden = torch.linspace(-3, 3, sums.numel()).view(sums.shape).to(dtype)
    expected = hidden + sums.to(dtype)
    linear.add_to(hidden, x)
    assert torch.equal(hidden, expected)


@builds
@all_codes
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[6]], ids=str)
def test_a_row_depends_on_nothing_beside_it(
    build: str, codes: Codes, dtype: torch.dtype, shape: Shape
) -> None:
    """Neither on the number of rows, which chooses the way of decoding, nor on that of threads."""
    weight = made(codes, shape, has_offsets=codes is Codes.UINT4)
    linear = packed(build, weight)
    x = rows_of(300, weight, dtype)
    torch.set_num_threads(2)
    expected = linear.floats(x)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 25, 60, 97):
        torch.set_num_threads(1 + num_rows % 2)
        assert torch.equal(linear.floats(x[:num_rows]), expected[:num_rows]), num_rows
        assert torch.equal(linear.floats(x[-num_rows:]), expected[-num_rows:]), num_rows


@builds
@all_codes
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_every_code_is_exact(build: str, codes: Codes, dtype: torch.dtype) -> None:
    """Rows of one 1 give columns of the weight: in blocks that decode in registers, that keep what they
    decode, and that take what is kept."""
    weight = made(codes, Shape(40, 256, 64))
    every = torch.arange(weight.packed.numel()).view(weight.packed.shape).to(torch.uint8)
    if codes is Codes.E4M3:
        every[every & 0x7F == 0x7F] = 0x7E
    weight = dataclasses.replace(weight, packed=every)
    linear, ones = packed(build, weight), torch.eye(256).to(dtype)
    expected = weight.dequantized().T
    for num_rows in (2, 8, 64):
        for first in range(0, 256, 64):
            found = linear.floats(ones[first : first + num_rows])
            assert torch.equal(found, expected[first : first + num_rows]), (num_rows, first)


@builds
@all_codes
def test_lookup_gives_rows_of_the_weight(build: str, codes: Codes) -> None:
    for shape in SHAPES:
        weight = made(codes, shape, has_offsets=True, has_order=shape.group == 32)
        ids = torch.tensor([shape.num_outputs - 1, 0, 3, 3])
        assert torch.equal(packed(build, weight).lookup(ids), weight.dequantized()[ids])


@builds
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [16, 40, 57])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gates_multiply_ups(build: str, gate: GatedActivation, size: int, has_bias: bool) -> None:
    weight = made(Codes.UINT4, Shape(2 * size, 128, 32), has_offsets=True)
    weight = dataclasses.replace(weight, scales=weight.scales * 0.01, offsets=None)
    bias = torch.randn(2 * size).bfloat16() if has_bias else None
    x = rows_of(7, weight, torch.bfloat16)
    expected = gate_mul(packed(build, weight, bias)(x).float(), gate)
    torch.testing.assert_close(
        packed(build, weight, bias, gate).gated(x).float(), expected, rtol=0.02, atol=1e-3
    )


@all_codes
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_torch_gives_the_same(codes: Codes, dtype: torch.dtype) -> None:
    weight = made(codes, Shape(1060, 64, 16), has_offsets=True, has_order=True)
    weight = dataclasses.replace(weight, scales=weight.scales * 2.0**-6)
    bias = torch.randn(1060)
    linear: Linear = DequantizingLinear(weight, bias)
    x = rows_of(5, weight, dtype)
    exact = F.linear(x.double(), weight.dequantized().double(), bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for result in (linear(x), linear.floats(x)):
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance * 10)
    assert torch.equal(linear.lookup(torch.tensor([9, 1])), weight.dequantized()[[9, 1]])


@needs_compiler
def test_parts_and_other_dtypes_are_multiplied() -> None:
    weight = made(Codes.INT8, Shape(80, 64, 32))
    linear = make_linear((weight.rows(slice(0, 20)), weight.rows(slice(20, 80))))
    assert isinstance(linear, PackedQuantizedLinear)
    x = rows_of(3, weight, torch.float16)
    check(linear.floats(x), x, weight)
    assert torch.equal(linear(x), linear.floats(x).half())
    product = linear.add_to(torch.zeros(3, 80, dtype=torch.float16), x)
    assert product is not None, "it is left for the norm that follows to add"
    assert torch.equal(product, linear(x))


@needs_compiler
def test_what_the_kernels_do_not_know_is_left_to_torch() -> None:
    nan = made(Codes.E4M3, SHAPES[0])
    nan.packed[3, 5] = 0xFF
    cut = made(Codes.INT8, Shape(8, 24, 12))
    for weight in (nan, cut):
        assert isinstance(make_linear(weight), DequantizingLinear)
    on_meta = dataclasses.replace(cut, packed=cut.packed.to("meta"), scales=cut.scales.to("meta"))
    assert isinstance(make_linear(on_meta), DequantizingLinear)


@pytest.mark.parametrize("zero", [7, 8])
def test_a_common_zero_needs_no_offsets(zero: int) -> None:
    weight = made(Codes.UINT4, SHAPES[1])
    shifted = dataclasses.replace(weight, offsets=weight.scales * -zero)
    form = PackedForm.of([shifted])
    assert form is not None
    assert form.offsets == ScaleKind.NONE
    assert form.table.tolist() == [code - zero for code in range(16)]
    other = dataclasses.replace(weight, offsets=weight.scales * -zero)
    assert other.offsets is not None
    other.offsets[0, 0] = 0
    form = PackedForm.of([other])
    assert form is not None
    assert form.offsets == ScaleKind.FLOAT


@pytest.mark.parametrize(
    ("value", "kind"),
    [(1.5, ScaleKind.BF16), (1 + 2.0**-10, ScaleKind.F16), (1 + 2.0**-20, ScaleKind.FLOAT)],
)
def test_scales_keep_the_bits_that_they_have(value: float, kind: ScaleKind) -> None:
    weight = made(Codes.INT8, SHAPES[1])
    form = PackedForm.of([dataclasses.replace(weight, scales=torch.full_like(weight.scales, value))])
    assert form is not None
    assert form.scales == kind


@builds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_scales_of_16_bits_are_exact(build: str, dtype: torch.dtype) -> None:
    weight = made(Codes.UINT4, SHAPES[1], has_offsets=True)
    assert weight.offsets is not None
    scales, offsets = (it.to(dtype).float() for it in (weight.scales, weight.offsets))
    weight = dataclasses.replace(weight, scales=scales, offsets=offsets)
    x = rows_of(4, weight, torch.bfloat16)
    check(packed(build, weight).floats(x), x, weight)
