"""Products in Triton with quantized weights, whose codes are decoded on the way to the tensor cores.

A tile of weights is the left factor of a tile's product, so that it stays in registers once decoded, and the
rows are the right one. The inputs are cut into segments, so many that few rows fill the device: their sums
are computed side by side and added in the order of the inputs by a second kernel. Nothing is added by who
comes first, so equal calls have equal results. With one tile for all numbers of rows, and segments that
follow from the weight's shape alone, a row's result depends on nothing else, either: where there are many
rows, one program computes all segments, in the same order."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.cuda.kv_elements import (
    ELEMENTS,
    FP8,
    magnitude_bits,
    narrowed,
    scale_of,
    unit,
    widened,
)
from workers.model.cuda.layer_ops import activated, gate_mul
from workers.model.cuda.segment_sums import factors_at, segment_sums
from workers.model.cuda.weight_codes import decoded, loaded_codes
from workers.model.finish import Finish
from workers.model.quantization.device_weight import DeviceWeight
from workers.model.quantization.quantized_weight import Codes

# Segments are made until this many programs run, two for each multiprocessor of a large card, but none of
# fewer tiles than this, and no more of them than this.
_PROGRAMS, _LEAST_TILES, _MOST_SEGMENTS = 256, 4, 16
# The columns of a program that adds segments, looks up or rounds.
_COLUMNS = 1024


class ProductTile(NamedTuple):
    """The division of the work: rows, outputs and inputs of a tile, and Triton's options."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


class Segments(NamedTuple):
    """The division of a row's inputs: how many inputs a segment has, and how many segments there are."""

    num_inputs: int
    num_segments: int


def product_tile(num_rows: int, dtype: torch.dtype, group: int, *, is_fixed: bool) -> ProductTile:
    """Return the tile for so many rows of a dtype and weights with groups of this size; `is_fixed`: the same
    one for every number of rows."""
    if dtype == torch.float32:
        tile = ProductTile(16, 32, 32, 4, 2)
    elif is_fixed or 16 < num_rows <= 64:
        tile = ProductTile(64, 64, 128, 4, 3)
    else:
        tile = ProductTile(16, 64, 128, 4, 4) if num_rows <= 16 else ProductTile(128, 128, 64, 8, 3)
    if group % tile.inputs and group % 64 == 0:
        return tile._replace(inputs=64)  # whose sums have one scale
    return tile


def segments_of(shape: tuple[int, int], tile: ProductTile) -> Segments:
    """Return the segments of products of few rows with a weight [num_outputs, num_inputs]."""
    num_outputs, num_inputs = shape
    num_tiles = triton.cdiv(num_inputs, tile.inputs)
    wanted = _PROGRAMS // triton.cdiv(num_outputs, tile.outputs)
    count = max(1, min(wanted, num_tiles // _LEAST_TILES, _MOST_SEGMENTS))
    tiles = triton.cdiv(num_tiles, count)
    return Segments(tiles * tile.inputs, triton.cdiv(num_tiles, tiles))


def multiplies_integers(weight: DeviceWeight) -> bool:
    """Whether rows that are rounded to int8 are multiplied as such: where a tile's sums have one scale."""
    is_whole = weight.group == weight.num_inputs or weight.group % 64 == 0
    return weight.codes is Codes.INT8 and weight.quantizes_inputs and is_whole


def multiply(
    x: Tensor,
    weight: DeviceWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    row_scales: Tensor | None = None,
    finish: Finish = "store",
    is_fixed: bool = False,
) -> None:
    """Write the product of x [num_rows, num_inputs], in the order of the weight's columns, `weight` and
    `bias` [num_outputs] to `out` [num_rows, num_outputs], or half as many outputs with a gate, rounded to its
    dtype, or add it there. `row_scales` float32 [num_rows] are factors of the rows. With `is_fixed`, a row's
    result depends on nothing else. Sums are float32, or of rows of int8 exact."""
    num_rows = x.shape[0]
    num_outputs, num_inputs = weight.shape
    assert x.shape[1] == num_inputs
    assert x.stride(1) == weight.packed.stride(1) == out.stride(1) == 1
    assert weight.scales.is_contiguous()
    assert weight.offsets is None or weight.offsets.is_contiguous()
    if not num_rows:
        return
    is_gated = finish in ("silu", "gelu_tanh")
    assert out.shape == (num_rows, num_outputs // 2 if is_gated else num_outputs)
    tile = product_tile(num_rows, x.dtype, weight.group, is_fixed=is_fixed)
    is_few = num_rows <= 64
    segments = segments_of(weight.shape, tile) if is_few or is_fixed else Segments(num_inputs, 1)
    if is_few and segments.num_segments > 1:
        partial = x.new_empty(segments.num_segments, num_rows, num_outputs, dtype=torch.float32)
        _launch(x, weight, None, None, partial, tile, segments, is_split=True)
        _add_segments(partial, bias, row_scales, out, finish)
        return
    target = out.new_empty(num_rows, num_outputs) if is_gated else out
    _launch(x, weight, bias, row_scales, target, tile, segments, is_added=finish == "add")
    if is_gated:
        gate_mul(target, finish, out)


def _launch(
    x: Tensor,
    weight: DeviceWeight,
    bias: Tensor | None,
    row_scales: Tensor | None,
    out: Tensor,
    tile: ProductTile,
    segments: Segments,
    *,
    is_split: bool = False,
    is_added: bool = False,
) -> None:
    num_rows = x.shape[0]
    num_outputs, num_inputs = weight.shape
    grid = triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs)
    _quantized_product_kernel[(*grid, segments.num_segments if is_split else 1)](
        x, weight.packed, weight.scale_words, weight.offsets, bias, row_scales, out,
        num_rows, num_outputs, num_inputs, weight.packed.shape[1], segments.num_inputs, segments.num_segments,
        x.stride(0), weight.packed.stride(0), weight.scales.shape[1], out.stride(-2),
        CODES=weight.kernel_codes, SCALES=weight.scales_name,
        SCALING=scaling_of(x.dtype, weight.group, num_inputs, tile),
        GROUP=0 if weight.group == num_inputs else weight.group, IS_SPLIT=is_split, IS_ADDED=is_added,
        PRECISION="ieee" if x.dtype == torch.float32 else None, ROWS=tile.rows, OUTPUTS=tile.outputs,
        INPUTS=tile.inputs, STAGES=tile.num_stages, num_warps=tile.num_warps, num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )  # fmt: skip


def scaling_of(dtype: torch.dtype, group: int, num_inputs: int, tile: ProductTile) -> str:
    """Return what is multiplied by scales, for rows of a dtype: sums of a segment ("row") or of a tile, or
    weights ("element")."""
    if group == num_inputs:
        return "row"
    # The sums of a tile of many rows are as many as its weights, and those cost no wait for the product.
    is_cheap = tile.rows <= 64 or dtype == torch.int8
    return "tile" if group % tile.inputs == 0 and is_cheap else "element"


def _add_segments(
    partial: Tensor, bias: Tensor | None, row_scales: Tensor | None, out: Tensor, finish: Finish
) -> None:
    count, num_rows, num_outputs = partial.shape
    _add_segments_kernel[(num_rows, triton.cdiv(out.shape[1], _COLUMNS))](
        partial, bias, row_scales, out, count, num_rows, num_outputs, out.stride(0), FINISH=finish,
        BLOCK=_COLUMNS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def round_rows(x: Tensor, codes: Codes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round x [num_rows, num_inputs] to int8 or e4m3 by a scale of each row. Returns the rounded values, in
    `dtype`, and the scales, float32 [num_rows]; that of a row which is not finite is NaN."""
    assert x.stride(1) == 1
    num_rows, num_inputs = x.shape
    rounded = x.new_empty(num_rows, num_inputs, dtype=dtype)
    scales = x.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        elements = ELEMENTS[torch.int8 if codes is Codes.INT8 else torch.float8_e4m3fn]
        _round_rows_kernel[(num_rows,)](
            x, rounded, scales, num_inputs, x.stride(0), KIND=elements, BLOCK=_COLUMNS, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return rounded, scales


def look_up(weight: DeviceWeight, ids: Tensor) -> Tensor:
    """Return the rows `ids` [num_ids] of the weight, float32 [num_ids, num_inputs]."""
    assert ids.is_contiguous()
    out = weight.scales.new_empty(len(ids), weight.num_inputs, dtype=torch.float32)
    if len(ids):
        _look_up_kernel[(len(ids), triton.cdiv(weight.num_inputs, _COLUMNS))](
            ids, weight.packed, weight.scale_words, weight.offsets, weight.order, out, weight.num_inputs,
            weight.packed.shape[1], weight.packed.stride(0), weight.scales.shape[1], weight.group,
            CODES=weight.kernel_codes, SCALES=weight.scales_name, BLOCK=_COLUMNS, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------- kernels


# One compiled kernel serves every number of rows of a tile.
@triton.jit(do_not_specialize=["num_rows"])
def _quantized_product_kernel(
    x, packed, scales, offsets, bias, row_scales, out,
    num_rows, num_outputs, num_inputs, row_bytes, segment_inputs, num_segments,
    x_stride, packed_stride, num_groups, out_stride,
    CODES: tl.constexpr, SCALES: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr,
    IS_SPLIT: tl.constexpr, IS_ADDED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :]
    outputs = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)[:, None]
    is_row, is_output = rows < num_rows, outputs < num_outputs
    x_columns = x + rows * x_stride
    packed_rows = packed + outputs * packed_stride
    groups = outputs * num_groups
    segment = tl.program_id(2)
    sums = segment_sums(
        x_columns, packed_rows, scales, offsets, groups, is_row, is_output, segment, segment_inputs,
        num_inputs, row_bytes, CODES, SCALES, SCALING, GROUP, PRECISION, ROWS, OUTPUTS, INPUTS, STAGES,
    )  # fmt: skip
    if IS_SPLIT:
        target = out + segment.to(tl.int64) * num_rows * num_outputs + rows * num_outputs + outputs
        tl.store(target, sums, mask=is_row & is_output)
    else:
        for later in range(1, num_segments):
            sums += segment_sums(
                x_columns, packed_rows, scales, offsets, groups, is_row, is_output, later, segment_inputs,
                num_inputs, row_bytes, CODES, SCALES, SCALING, GROUP, PRECISION, ROWS, OUTPUTS, INPUTS,
                STAGES,
            )  # fmt: skip
        if row_scales is not None:
            sums *= tl.load(row_scales + rows, mask=is_row, other=0.0)
        if bias is not None:
            sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
        target = out + rows * out_stride + outputs
        result = sums.to(out.dtype.element_ty)
        if IS_ADDED:
            held = tl.load(target, mask=is_row & is_output, other=0.0).to(tl.float32)
            result = (held + result.to(tl.float32)).to(result.dtype)
        tl.store(target, result, mask=is_row & is_output)


@triton.jit
def _added(partial, bias, factor, columns, is_there, count, distance, dtype: tl.constexpr):
    """Return the sum of the segments of a row, times its factor and with the bias, rounded."""
    sums = tl.load(partial + columns, mask=is_there, other=0.0)
    for segment in range(1, count):
        sums += tl.load(partial + segment * distance + columns, mask=is_there, other=0.0)
    sums *= factor
    if bias is not None:
        sums += tl.load(bias + columns, mask=is_there, other=0.0).to(tl.float32)
    return sums.to(dtype)


@triton.jit(do_not_specialize=["count", "num_rows"])
def _add_segments_kernel(
    partial, bias, row_scales, out, count, num_rows, num_outputs, out_stride, FINISH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    is_gated: tl.constexpr = FINISH == "silu" or FINISH == "gelu_tanh"
    num_columns = num_outputs // 2 if is_gated else num_outputs
    is_there = columns < num_columns
    distance = tl.cast(num_rows, tl.int64) * num_outputs
    factor = 1.0
    if row_scales is not None:
        factor = tl.load(row_scales + row)
    own = partial + row * num_outputs
    result = _added(own, bias, factor, columns, is_there, count, distance, dtype)
    target = out + row * out_stride + columns
    if is_gated:
        ups = columns + num_columns
        up = _added(own, bias, factor, ups, is_there, count, distance, dtype).to(tl.float32)
        result = (activated(result, FINISH == "gelu_tanh") * up).to(dtype)
    if FINISH == "add":
        held = tl.load(target, mask=is_there, other=0.0).to(tl.float32)
        result = (held + result.to(tl.float32)).to(dtype)
    tl.store(target, result, mask=is_there)


@triton.jit
def _round_rows_kernel(
    x, rounded, scales, num_inputs, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = x + row * x_stride
    columns = tl.arange(0, BLOCK)[None, :]
    most = tl.zeros((1, BLOCK), dtype=tl.int32)
    for first in range(0, num_inputs, BLOCK):
        wide = tl.load(own + first + columns, mask=columns < num_inputs - first, other=0.0).to(tl.float32)
        most = tl.maximum(most, magnitude_bits(wide))
    inverse, scale = scale_of(tl.max(most, 1)[:, None], KIND)
    tl.store(scales + row + tl.zeros((1, 1), dtype=tl.int32), scale)
    for first in range(0, num_inputs, BLOCK):
        is_there = columns < num_inputs - first
        wide = tl.load(own + first + columns, mask=is_there, other=0.0).to(tl.float32)
        raw = narrowed(tl.where(inverse > 0, wide, 0.0) * inverse, KIND)
        if KIND == FP8:
            values = (widened(raw, tl.float32, FP8) * unit(FP8)).to(rounded.dtype.element_ty)
        else:
            values = raw.to(rounded.dtype.element_ty)
        tl.store(rounded + row * num_inputs + first + columns, values, mask=is_there)


# The ids are part of an upload, whose alignment differs from step to step.
@triton.jit(do_not_specialize_on_alignment=["ids"])
def _look_up_kernel(
    ids, packed, scales, offsets, order, out, num_inputs, row_bytes, packed_stride, num_groups, group,
    CODES: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(ids + row).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)[None, :]
    is_there = columns < num_inputs
    begin = tl.full((1, 1), 0, tl.int64) + source * packed_stride
    values = decoded(loaded_codes(packed + begin, first, row_bytes, begin >= 0, CODES, BLOCK), CODES)
    groups, own = source * num_groups, columns // group
    values *= factors_at(scales, groups, own, is_there, SCALES)
    if offsets is not None:
        values += tl.load(offsets + groups + own, mask=is_there, other=0.0)
    places = columns
    if order is not None:
        places = tl.load(order + columns, mask=is_there, other=0)
    tl.store(out + row * num_inputs + places, values, mask=is_there)
