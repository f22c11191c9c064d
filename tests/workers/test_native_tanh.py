"""The hyperbolic tangent of the kernels' vectors, by which scores are capped, against float64."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from compiled_kernels import ISAS
from optional_programs import needs_compiler
from torch import Tensor

from kvtransfer.common.compiler import compile_library
from workers.model import native
from workers.model.native.isa import Isa

SIMD = Path(native.__file__).with_name("simd.h")
SOURCE = f"""
#include "{SIMD}"
extern "C" void each_tanh(float* values, int64_t count) {{
  for (int64_t i = 0; i < count; i += LANES) store(vtanh(load(values + i)), values + i);
}}
"""
SPACING = 2.0**-23


@pytest.fixture(params=ISAS)
def library(request: pytest.FixtureRequest, tmp_path: Path) -> ctypes.CDLL:
    isa: Isa = request.param
    source = tmp_path / "tanh.cpp"
    source.write_text(SOURCE)
    path = compile_library(source, (*native._FLAGS, *isa.compiler_flags))
    assert path is not None
    return ctypes.CDLL(str(path))


def tanh(library: ctypes.CDLL, values: Tensor) -> Tensor:
    """Return the results for float32 `values`, whose number is a multiple of 16."""
    result = values.clone()
    library.each_tanh(ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(len(result)))
    return result


@needs_compiler
def test_it_is_within_four_units_of_the_last_place(library: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = 10.0 ** torch.empty(1 << 18, dtype=torch.float64).uniform_(-20, 1.3, generator=generator)
    values = torch.cat((sizes, torch.linspace(0.6, 0.65, 1 << 12), torch.linspace(8, 12, 1 << 12))).float()
    exact = values.double().tanh()
    units = (tanh(library, values).double() - exact).abs() / (exact * SPACING)
    assert float(units.max()) <= 4
    assert torch.equal(tanh(library, -values), -tanh(library, values))


@needs_compiler
def test_the_ends_of_its_range(library: ctypes.CDLL) -> None:
    values = torch.tensor([0.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 20.0, -20.0] * 2)
    expected = torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0, torch.nan, 1.0, -1.0] * 2)
    torch.testing.assert_close(tanh(library, values), expected, rtol=0, atol=0, equal_nan=True)
