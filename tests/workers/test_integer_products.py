"""Products of rounded rows with weights of int8, by every instruction set of this CPU and by torch, against
sums of integers in numpy, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from compiled_kernels import EMULATED, KERNELS, kernels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_programs import needs_compiler
from torch import Tensor

from kvtransfer.common.host import cpu_flags
from workers.model import native
from workers.model.make_linear import make_linear
from workers.model.native.isa import Isa
from workers.model.products import GatedActivation, Linear, gate_mul
from workers.model.quantization.integer_product import IntegerLinear
from workers.model.quantization.kept_forms import has_products
from workers.model.quantization.packed_codes import CodeKind, PackedForm
from workers.model.quantization.packed_product import PackedQuantizedLinear
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight
from workers.model.quantization.torch_product import DequantizingLinear

DTYPES = (torch.float32, torch.bfloat16)
TORCH = "torch"

isas = pytest.mark.parametrize("isa", KERNELS)
ways = pytest.mark.parametrize("way", [TORCH, *KERNELS])


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class Size(NamedTuple):
    """The sizes of a weight."""

    num_outputs: int
    num_inputs: int


# Outputs within a panel, of several and of whole ones; inputs within a step, of whole tiles, and of several
# blocks that torch adds.
SIZES = (Size(5, 12), Size(70, 64), Size(33, 1003), Size(96, 320), Size(64, 2050))


def drawn_weight(
    size: Size, *, has_offsets: bool = False, has_order: bool = False, is_extreme: bool = False
) -> QuantizedWeight:
    """Draw codes, the extreme ones alone if asked, and scales that no 16 bits hold."""
    drawn = torch.Generator().manual_seed(sum(size))
    packed = torch.randint(0, 256, size, generator=drawn, dtype=torch.uint8)
    if is_extreme:
        packed = torch.full(size, 0x80, dtype=torch.uint8)
        packed[1::2] = 0x7F
    scales = torch.rand(size.num_outputs, 1, generator=drawn) + 0.1
    offsets = torch.randn(scales.shape, generator=drawn) if has_offsets else None
    order = torch.randperm(size.num_inputs, generator=drawn) if has_order else None
    return QuantizedWeight(Codes.INT8, packed, scales, size.num_inputs, offsets, order, quantizes_inputs=True)


def drawn_rows(num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """Draw rows of very different magnitudes."""
    drawn = torch.Generator().manual_seed(num_rows)
    factors = torch.logspace(-3, 4, num_rows)[:, None]
    return (torch.randn(num_rows, num_inputs, generator=drawn) * factors).to(dtype)


def expected_of(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Round the rows, add up integers, and scale these in float32."""
    ordered = x if weight.order is None else x[:, weight.order]
    wide = ordered.float().numpy()
    most = np.abs(wide).max(1, keepdims=True)
    rows = np.rint(wide * (np.float32(127) / most)).astype(np.int64)
    sums = (rows @ weight.packed.view(torch.int8).numpy().astype(np.int64).T).astype(np.float32)
    result = sums * weight.scales.numpy().T
    if weight.offsets is not None:
        result = result + weight.offsets.numpy().T * rows.sum(1, keepdims=True).astype(np.float32)
    result = result * (most / np.float32(127))
    return torch.from_numpy(result if bias is None else result + bias.float().numpy())


def made(
    way: str,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    gate: GatedActivation | None = None,
) -> Linear:
    """Make the product by torch, or by an instruction set with the macros that follow its name."""
    if way == TORCH:
        return IntegerLinear(weight, bias, gate=gate)
    isa, *defines = way.split()
    kernels = kernels_of(isa, *defines)
    return PackedQuantizedLinear(kernels, weight, PackedForm.of_integers(weight), bias, gate=gate)


def check_all_sizes(way: str) -> None:
    for size, dtype in ((size, dtype) for size in SIZES for dtype in DTYPES):
        weight = drawn_weight(size)
        for num_rows in (1, 2, 3, 4, 7, 12, 13, 30):
            x = drawn_rows(num_rows, size.num_inputs, dtype)
            assert torch.equal(made(way, weight).floats(x), expected_of(x, weight)), (size, dtype, num_rows)


@ways
@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(1, 40),
    has_offsets=st.booleans(),
    has_order=st.booleans(),
    has_bias=st.booleans(),
    is_extreme=st.booleans(),
)
def test_sums_are_exact(
    way: str,
    size: Size,
    dtype: torch.dtype,
    num_rows: int,
    has_offsets: bool,
    has_order: bool,
    has_bias: bool,
    is_extreme: bool,
) -> None:
    weight = drawn_weight(size, has_offsets=has_offsets, has_order=has_order, is_extreme=is_extreme)
    bias = torch.linspace(-9, 9, size.num_outputs).to(dtype) if has_bias else None
    x = drawn_rows(num_rows, size.num_inputs, dtype)
    if is_extreme:
        x = x.abs().amax(1, keepdim=True).expand(x.shape).contiguous()
    linear, expected = made(way, weight, bias), expected_of(x, weight, bias)
    assert torch.equal(linear.floats(x), expected)
    assert torch.equal(linear(x), expected.to(dtype)), "rounded once"
    hidden = torch.linspace(-3, 3, expected.numel()).view(expected.shape).to(dtype)
    added = hidden + expected.to(dtype)
    product = linear.add_to(hidden, x)
    assert torch.equal(hidden if product is None else hidden + product, added)


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif("avx512_vnni" not in cpu_flags(), reason="this CPU does not multiply bytes by AVX-512")
@pytest.mark.parametrize("define", ["TANDEM_WITHOUT_VNNI", EMULATED])
def test_sums_are_exact_by_the_ways_of_other_cpus(define: str) -> None:
    """By AVX-512 with 16 bits, and by tiles."""
    check_all_sizes(f"{Isa.AVX512.value} {define}")


@isas
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_a_row_depends_on_nothing_beside_it(isa: str, dtype: torch.dtype) -> None:
    """Neither on the number of rows nor on that of threads; the rows are more than share a panel at once."""
    weight = drawn_weight(SIZES[4])
    linear = made(isa, weight)
    x = drawn_rows(1100, weight.num_inputs, dtype)
    torch.set_num_threads(2)
    expected = linear.floats(x)
    assert torch.equal(expected, expected_of(x, weight))
    for num_rows in (1, 2, 5, 12, 13, 60, 97):
        torch.set_num_threads(1 + num_rows % 2)
        assert torch.equal(linear.floats(x[-num_rows:]), expected[-num_rows:]), num_rows


@ways
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [16, 57])
def test_gates_multiply_ups(way: str, gate: GatedActivation, size: int) -> None:
    weight = drawn_weight(Size(2 * size, 128))
    weight = dataclasses.replace(weight, scales=weight.scales * 0.001)
    bias = torch.randn(2 * size).bfloat16()
    x = drawn_rows(7, 128, torch.float32).sign().add(0.1).bfloat16()
    expected = gate_mul(expected_of(x, weight, bias).bfloat16().float(), gate)
    found = made(way, weight, bias, gate).gated(x)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=1e-3)


@ways
def test_rows_without_a_scale_become_biases_or_nan(way: str) -> None:
    weight, bias = drawn_weight(SIZES[1]), torch.linspace(-9, 9, 70)
    x = torch.ones(4, 64)
    x[0], x[1, 63], x[2, 5] = 1e-38, float("nan"), float("inf")
    found = made(way, weight, bias).floats(x)
    assert torch.equal(found[0], bias)
    assert found[1:3].isnan().all()
    assert torch.equal(found[3:], expected_of(x[3:], weight, bias))


@ways
def test_lookup_gives_rows_of_the_weight(way: str) -> None:
    for size in SIZES:
        weight = drawn_weight(size, has_offsets=True, has_order=True)
        ids = torch.tensor([size.num_outputs - 1, 0, 3, 3])
        assert torch.equal(made(way, weight).lookup(ids), weight.dequantized()[ids])


def test_inputs_are_rounded_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that KV does not depend on whether there is a compiler."""
    weight = drawn_weight(SIZES[2])
    parts = weight.rows(slice(0, 20)), weight.rows(slice(20, 33))
    x = drawn_rows(6, weight.num_inputs, torch.float16).clamp(-60, 60)
    expected = expected_of(x, weight)
    for has_kernels in (True, False):
        if not has_kernels:
            monkeypatch.setattr(native, "load", lambda: None)
        assert has_products(weight)
        linear = make_linear(parts)
        assert isinstance(linear, PackedQuantizedLinear) == (native.load() is not None)
        assert torch.equal(linear.floats(x), expected)


def test_what_multiplies_bytes_is_compiled_where_a_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for flags in (frozenset[str](), frozenset({"avx512_vnni", "amx_int8"})):
        monkeypatch.setattr("workers.model.native.isa.cpu_flags", lambda flags=flags: flags)
        found[len(flags)] = {isa: set(isa.compiler_flags) for isa in Isa}
    added = {isa: found[2][isa] - found[0][isa] for isa in Isa}
    vnni = {"-mavx512vnni"}
    assert added == {
        Isa.AMX: {*vnni, "-mamx-int8"},
        Isa.AVX512_BF16: vnni,
        Isa.AVX512: vnni,
        Isa.AVX2: set(),
    }


@needs_compiler
def test_other_weights_are_multiplied_by_rows_as_they_are() -> None:
    weight = drawn_weight(SIZES[1])
    in_groups = dataclasses.replace(weight, scales=weight.scales.expand(-1, 2).contiguous(), group=32)
    float8 = dataclasses.replace(weight, codes=Codes.E4M3, packed=weight.packed & 0x3F)
    for other in (in_groups, float8, dataclasses.replace(weight, quantizes_inputs=False)):
        x = drawn_rows(3, 64, torch.float32)
        torch.testing.assert_close(
            make_linear(other).floats(x), DequantizingLinear(other).floats(x), rtol=1e-4, atol=1e-2
        )
    assert PackedForm.of_integers(weight).kind == CodeKind.INTEGERS
