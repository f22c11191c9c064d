"""Products in Triton in which a row's result depends on nothing else: for `deterministic: true`.

Tiles have one size whatever the number of rows, and the sum over a row's inputs is taken by one program in
one order: no split over the inputs, unlike libraries, which choose both by the size of the batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The rows, outputs and inputs of a tile.
_ROWS, _OUTPUTS, _INPUTS = 64, 64, 64


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, is_added: bool = False) -> None:
    """Write the product of x [num_rows, num_inputs], `weight` [num_outputs, num_inputs] and `bias`
    [num_outputs] to `out` [num_rows, num_outputs], rounded to its dtype, or add it there. Sums are
    float32."""
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    assert weight.shape[1] == num_inputs
    assert out.shape == (num_rows, num_outputs)
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    if not num_rows:
        return
    _multiply_kernel[(triton.cdiv(num_outputs, _OUTPUTS), triton.cdiv(num_rows, _ROWS))](
        x, weight, bias, out, num_rows, num_outputs, num_inputs,
        x.stride(0), weight.stride(0), out.stride(0), HAS_BIAS=bias is not None, IS_ADDED=is_added,
        PRECISION="ieee" if x.dtype == torch.float32 else None,
        ROWS=_ROWS, OUTPUTS=_OUTPUTS, INPUTS=_INPUTS, num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["num_rows"])
def _multiply_kernel(
    x, weight, bias, out, num_rows, num_outputs, num_inputs, x_stride, weight_stride, out_stride,
    HAS_BIAS: tl.constexpr, IS_ADDED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    inputs = tl.arange(0, INPUTS)
    x_rows = x + rows.to(tl.int64) * x_stride + inputs[None, :]
    weight_rows = weight + outputs.to(tl.int64) * weight_stride + inputs[:, None]
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        in_row = inputs < num_inputs - first
        a = tl.load(x_rows + first, mask=(rows < num_rows) & in_row[None, :], other=0.0)
        b = tl.load(weight_rows + first, mask=(outputs < num_outputs) & in_row[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
    is_there = (rows < num_rows) & (outputs < num_outputs)
    target = out + rows.to(tl.int64) * out_stride + outputs
    result = sums.to(out.dtype.element_ty)
    if IS_ADDED:
        result = (tl.load(target, mask=is_there).to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(target, result, mask=is_there)
