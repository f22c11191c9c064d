"""The products of a layer's experts with quantized weights in Triton.

Rows are sorted and results added as `workers.model.cuda.experts` does it. A program multiplies a tile of rows
of one expert with a tile of its weights, whose codes are decoded as those of linear products, in one order of
the inputs: with one tile for all numbers of rows, a row's result depends on nothing else. Outputs of gate and
up take turns in a tile, so that the program has both of a column and stores what is activated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.cuda.experts import GateEpilogue, SortedRows, gated
from workers.model.cuda.quantized_product import ProductTile, scaling_of
from workers.model.cuda.segment_sums import segment_sums
from workers.model.quantization.device_weight import DeviceWeight


def multiply_gate_up(
    x: Tensor,
    weight: DeviceWeight,
    gate: GateEpilogue,
    order: SortedRows,
    num_chosen: int,
    tile: ProductTile,
) -> Tensor:
    """Compute the activated columns [num_pairs, size] of the rows, by x [num_tokens, hidden_size] and
    `weight` [num_experts, 2 * size, hidden_size], whose rows of gates come first, or half as many outputs
    with `relu2`. Behind the last row they are undefined."""
    out = x.new_empty(len(order.pairs), gate.size_of(weight.num_outputs))
    _launch(x, weight, gate, order, out, tile, num_chosen)
    return out


def multiply_down(
    x: Tensor, weight: DeviceWeight, order: SortedRows, tile: ProductTile, dtype: torch.dtype
) -> Tensor:
    """Compute the products [num_pairs, hidden_size] of the rows' activated columns x [num_pairs, size] with
    `weight` [num_experts, hidden_size, size], rounded to `dtype`. Behind the last row they are undefined."""
    out = x.new_empty(len(x), weight.num_outputs, dtype=dtype)
    _launch(x, weight, None, order, out, tile)
    return out


def _launch(
    x: Tensor,
    weight: DeviceWeight,
    gate: GateEpilogue | None,
    order: SortedRows,
    out: Tensor,
    tile: ProductTile,
    num_chosen: int = 1,
) -> None:
    num_inputs, num_groups = weight.num_inputs, weight.scales.shape[2]
    assert x.shape[1] == num_inputs
    assert x.stride(1) == 1
    assert all(it is None or it.is_contiguous() for it in (weight.packed, weight.scales, weight.offsets))
    alpha, limit = (0.0, 0.0) if gate is None else gate.clamp
    _expert_product_kernel[(triton.cdiv(weight.num_outputs, tile.outputs), len(order.tiles))](
        x, weight.packed, weight.scale_words, weight.offsets, None if gate is None else gate.bias, out,
        order.pairs, order.tiles, num_chosen, x.stride(0), weight.num_outputs, num_inputs,
        weight.packed.shape[2], num_groups, alpha, limit,
        CODES=weight.kernel_codes, SCALES=weight.scales_name,
        SCALING=scaling_of(x.dtype, weight.group, num_inputs, tile),
        GROUP=0 if weight.group == num_inputs else weight.group,
        ACTIVATION="" if gate is None else gate.activation,
        PRECISION="ieee" if x.dtype == torch.float32 else None, ROWS=tile.rows, OUTPUTS=tile.outputs,
        INPUTS=tile.inputs, STAGES=tile.num_stages, num_warps=tile.num_warps, num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )  # fmt: skip


# One compiled kernel serves every number of chosen experts, so that it can be compiled before that is known.
@triton.jit(do_not_specialize=["num_chosen"])
def _expert_product_kernel(
    x, packed, scales, offsets, bias, out, pairs, tiles, num_chosen,
    x_stride, num_outputs, num_inputs, row_bytes, num_groups, alpha, limit,
    CODES: tl.constexpr, SCALES: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows. With an activation, rows are of tokens, and even places of a tile of outputs
    are of gates, if there are any; without, rows are of pairs."""
    HAS_GATES: tl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    own = tiles + 3 * tl.program_id(1)
    expert = tl.load(own).to(tl.int64)
    if expert < 0:
        return
    rows = (tl.load(own + 1) + tl.arange(0, ROWS))[None, :]
    is_row = rows < tl.load(own + 2)
    sources = rows
    outputs = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS))[:, None]
    is_output = outputs < num_outputs
    if ACTIVATION != "":
        sources = tl.load(pairs + rows, mask=is_row, other=0) // num_chosen
    if HAS_GATES:
        outputs = outputs // 2 + (outputs % 2) * (num_outputs // 2)
    weight_rows = expert * num_outputs + outputs
    sums = segment_sums(
        x + sources.to(tl.int64) * x_stride, packed + weight_rows * row_bytes, scales, offsets,
        weight_rows * num_groups, is_row, is_output, 0, num_inputs,
        num_inputs, row_bytes, CODES, SCALES, SCALING, GROUP, PRECISION, ROWS, OUTPUTS, INPUTS, STAGES,
    )  # fmt: skip
    if bias is not None:
        sums += tl.load(bias + weight_rows, mask=is_output, other=0.0).to(tl.float32)
    if not HAS_GATES:
        if ACTIVATION == "relu2":
            sums = gated(sums, sums, alpha, limit, ACTIVATION)
        target = out + rows.to(tl.int64) * num_outputs + outputs
        tl.store(target, sums.to(out.dtype.element_ty), mask=is_row & is_output)
    else:
        gate, up = tl.split(tl.permute(sums.reshape(OUTPUTS // 2, 2, ROWS), (0, 2, 1)))
        result = gated(gate, up, alpha, limit, ACTIVATION).to(out.dtype.element_ty)
        size = num_outputs // 2
        columns = (tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2))[:, None]
        tl.store(out + rows.to(tl.int64) * size + columns, result, mask=is_row & (columns < size))
