"""Products in Triton whose sums have one order for a weight, in tiles that suit the number of rows: for
`deterministic: true`.

The inputs of a weight are cut into segments, whose number follows from the weight's shape alone. A segment is
one chain of products of tensor cores, 16 inputs after 16, and segments are added in their order. Weights are
the left factor of a tile's product and rows the right one, so that a few rows need a tile of 16 columns
while the instruction keeps its 64 outputs: tiles for 16, 32, 64, 128 and 256 rows differ in the columns of
the instruction alone, which do not enter an element's sum. `product_choice` checks this on the card.

- Up to 256 rows, each segment is a program, which stores its sums in float32. A second kernel adds them. With
  one segment the program stores results.
- More rows are computed by as many programs as there are multiprocessors, each of which takes tile after
  tile. Between two segments its sums are in memory that it alone uses, because registers hold those of one
  segment only.

The sizes are for Hopper. A stage of a thin tile is 8 KiB of weights and 2 of rows; with eight stages two
programs have 112 KiB of weights on their way on a multiprocessor. Wide tiles of 128 outputs and 256 rows have
128 registers of sums a thread with 8 warps, and three stages take 144 KiB. Not yet validated on a card."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from workers.model.cuda.card import card_of
from workers.model.cuda.quantized_product import Segments

# The inputs of a step of a tile, and the dtypes of tensor cores.
INPUTS = 64
DTYPES = (torch.bfloat16, torch.float16)
# Weights of few outputs are cut until this many tiles of 64 outputs and a segment exist, into segments of at
# least so many inputs, and no more of them than this.
_TILES, _LEAST_INPUTS, _MOST_SEGMENTS = 96, 512, 4
# Rows up to this number are computed in one wave of programs for a segment.
_FEW_ROWS = 256
# Tiles whose outputs follow one another while their rows stay the same, which share what they read.
_GROUP_TILES = 8
_COLUMNS = 1024
# The distances and addresses of copies without threads are multiples of this many bytes.
_ALIGNMENT = 16


class RowTile(NamedTuple):
    """The division of the work: rows and outputs of a tile, and Triton's options."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


def segments_of(num_outputs: int, num_inputs: int) -> Segments:
    """Return the segments of products with a weight [num_outputs, num_inputs]."""
    count = 1
    while (
        count < _MOST_SEGMENTS
        and count * triton.cdiv(num_outputs, 64) < _TILES
        and num_inputs // (2 * count) >= _LEAST_INPUTS
    ):
        count *= 2
    size = triton.cdiv(triton.cdiv(num_inputs, count), INPUTS) * INPUTS
    return Segments(size, triton.cdiv(num_inputs, size))


def row_tiles(capability: int) -> tuple[RowTile, ...]:
    """Return the tiles of a kind of cards, of few rows first."""
    if capability in (90, 100, 103):
        few = RowTile(16, 64, 4, 8), RowTile(32, 64, 4, 7), RowTile(64, 64, 4, 6)
        if capability == 90:
            return *few, RowTile(128, 128, 8, 4), RowTile(256, 128, 8, 3)
        return *few, RowTile(128, 128, 8, 3)
    wide = RowTile(128, 128, 8, 3 if capability in (80, 87) else 2)
    return RowTile(16, 64, 4, 5), RowTile(32, 64, 4, 5), RowTile(64, 64, 4, 4), wide


def tile_for(tiles: tuple[RowTile, ...], num_rows: int, num_outputs: int) -> RowTile:
    """Return the tile for so many rows: the smallest that has them all; the next smaller one where the
    programs of a segment would be few."""
    at = 0
    while at + 1 < len(tiles) and tiles[at].rows < num_rows:
        at += 1
    is_thin = triton.cdiv(num_outputs, tiles[at].outputs) * triton.cdiv(num_rows, tiles[at].rows) < 64
    return tiles[at - 1] if at and tiles[at].rows == 256 and is_thin else tiles[at]


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    tiles: tuple[RowTile, ...],
    is_added: bool = False,
) -> None:
    """Write the product of x [num_rows, num_inputs], `weight` [num_outputs, num_inputs] and `bias`
    [num_outputs] to `out` [num_rows, num_outputs], rounded to its dtype, or add it there, in one of the
    `tiles`. Sums are float32."""
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    assert x.dtype == weight.dtype
    assert weight.shape[1] == num_inputs
    assert out.shape == (num_rows, num_outputs)
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    if not num_rows:
        return
    tile = tile_for(tiles, num_rows, num_outputs)
    segments = segments_of(num_outputs, num_inputs)
    num_tiles = triton.cdiv(num_outputs, tile.outputs) * triton.cdiv(num_rows, tile.rows)
    if segments.num_segments > 1 and num_rows <= _FEW_ROWS:
        partial = x.new_empty(segments.num_segments, num_rows, num_outputs, dtype=torch.float32)
        _launch(x, weight, None, partial, partial, tile, segments, num_tiles, is_split=True)
        _add_segments_kernel[(num_rows, triton.cdiv(num_outputs, _COLUMNS))](
            partial, bias, out, num_rows, num_outputs, out.stride(0), COUNT=segments.num_segments,
            IS_ADDED=is_added, BLOCK=_COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return
    num_programs = num_tiles if num_rows <= _FEW_ROWS else min(num_tiles, _num_multiprocessors(x.device))
    sums = out
    if segments.num_segments > 1:
        sums = x.new_empty(num_programs, tile.outputs, tile.rows, dtype=torch.float32)
    _launch(x, weight, bias, sums, out, tile, segments, num_programs, is_added=is_added)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sums: Tensor,
    out: Tensor,
    tile: RowTile,
    segments: Segments,
    num_programs: int,
    *,
    is_split: bool = False,
    is_added: bool = False,
) -> None:
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    has_descriptors = card_of(x.device).has_descriptors and _is_aligned(x) and _is_aligned(weight)
    factors: tuple[Any, Any] = (x, weight)
    if has_descriptors:
        blocks = [tile.rows, INPUTS], [tile.outputs, INPUTS]
        factors = (_described(x, blocks[0]), _described(weight, blocks[1]))
    _segmented_product_kernel[(num_programs, segments.num_segments if is_split else 1)](
        *factors, bias, sums, out, num_rows, num_outputs, num_inputs, segments.num_inputs,
        x.stride(0), weight.stride(0), out.stride(-2),
        NUM_SEGMENTS=segments.num_segments, IS_SPLIT=is_split, HAS_BIAS=bias is not None, IS_ADDED=is_added,
        HAS_DESCRIPTORS=has_descriptors, ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=INPUTS,
        GROUP=_GROUP_TILES, num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def _is_aligned(factor: Tensor) -> bool:
    """Whether the rows of a factor can be copied by their coordinates."""
    distance = factor.stride(0) * factor.itemsize
    is_apart = factor.stride(0) >= factor.shape[1]
    return is_apart and factor.data_ptr() % _ALIGNMENT == 0 and distance % _ALIGNMENT == 0


def _described(factor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(factor, list(factor.shape), list(factor.stride()), block)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # so that programs of the interpreter take several tiles
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


# ---------------------------------------------------------------------------------------------- kernels


# One compiled kernel serves every number of rows of a tile.
@triton.jit(do_not_specialize=["num_rows"])
def _segmented_product_kernel(
    x, weight, bias, sums, out, num_rows, num_outputs, num_inputs, segment_inputs,
    x_stride, weight_stride, out_stride,
    NUM_SEGMENTS: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_ADDED: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Compute every num_programs(0)-th tile, of one segment if `IS_SPLIT`. Grid: (any, segments or 1)."""
    output_tiles, row_tiles = tl.cdiv(num_outputs, OUTPUTS), tl.cdiv(num_rows, ROWS)
    for tile in tl.range(tl.program_id(0), output_tiles * row_tiles, tl.num_programs(0)):
        # Tiles of a group have GROUP tiles of outputs and all rows.
        group = tile // (GROUP * row_tiles)
        size = tl.minimum(output_tiles - group * GROUP, GROUP)
        within = tile % (GROUP * row_tiles)
        first_output = (group * GROUP + within % size) * OUTPUTS
        first_row = within // size * ROWS
        if IS_SPLIT:
            segment = tl.program_id(1)
            result = _segment_sums(
                x, weight, first_row, first_output, segment * segment_inputs, segment_inputs, num_rows,
                num_outputs, num_inputs, x_stride, weight_stride, HAS_DESCRIPTORS, ROWS, OUTPUTS, INPUTS,
            )  # fmt: skip
            outputs = (first_output + tl.arange(0, OUTPUTS))[:, None]
            rows = (first_row + tl.arange(0, ROWS))[None, :]
            at = (segment.to(tl.int64) * num_rows + rows) * num_outputs + outputs
            tl.store(sums + at, result, mask=(rows < num_rows) & (outputs < num_outputs))
        else:
            own = sums + tl.program_id(0).to(tl.int64) * (OUTPUTS * ROWS)
            for segment in tl.range(NUM_SEGMENTS):
                result = _segment_sums(
                    x, weight, first_row, first_output, segment * segment_inputs, segment_inputs, num_rows,
                    num_outputs, num_inputs, x_stride, weight_stride, HAS_DESCRIPTORS, ROWS, OUTPUTS, INPUTS,
                )  # fmt: skip
                if ROWS == 256:  # parts one after the other, which leaves registers for what they meet
                    halves = tl.permute(tl.reshape(result, (OUTPUTS, 2, ROWS // 2)), (0, 2, 1))
                    left, right = tl.split(halves)
                    for part in tl.static_range(4):
                        if part % 2 == 0:
                            half = left if part == 0 else right
                            quarters = tl.permute(tl.reshape(half, (OUTPUTS, 2, ROWS // 4)), (0, 2, 1))
                            quarter, other = tl.split(quarters)
                        else:
                            quarter = other
                        _settle(
                            quarter, own + OUTPUTS * (ROWS // 4) * part, bias, out,
                            first_row + ROWS // 4 * part, first_output, num_rows, num_outputs, out_stride,
                            segment == 0, segment == NUM_SEGMENTS - 1, HAS_BIAS, IS_ADDED, OUTPUTS, ROWS // 4,
                        )  # fmt: skip
                else:
                    _settle(
                        result, own, bias, out, first_row, first_output, num_rows, num_outputs, out_stride,
                        segment == 0, segment == NUM_SEGMENTS - 1, HAS_BIAS, IS_ADDED, OUTPUTS, ROWS,
                    )  # fmt: skip


@triton.jit
def _settle(
    sums, own, bias, out, first_row, first_output, num_rows, num_outputs, out_stride,
    is_first, is_last, HAS_BIAS: tl.constexpr, IS_ADDED: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the sums [OUTPUTS, ROWS] of a segment to those of the segments before, which are in the program's
    `own` memory, and keep them there, or write the results of the last one."""
    kept = own + tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    if not is_first:
        tl.debug_barrier()
        sums = tl.load(kept) + sums
        tl.debug_barrier()
    if is_last:
        outputs = (first_output + tl.arange(0, OUTPUTS))[:, None]
        rows = (first_row + tl.arange(0, ROWS))[None, :]
        is_there = (rows < num_rows) & (outputs < num_outputs)
        if HAS_BIAS:
            sums += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
        target = out + rows.to(tl.int64) * out_stride + outputs
        rounded = sums.to(out.dtype.element_ty)
        if IS_ADDED:
            held = tl.load(target, mask=is_there, other=0.0).to(tl.float32)
            rounded = (held + rounded.to(tl.float32)).to(rounded.dtype)
        tl.store(target, rounded, mask=is_there)
    else:
        tl.store(kept, sums)


@triton.jit
def _segment_sums(
    x, weight, first_row, first_output, first_input, segment_inputs, num_rows, num_outputs, num_inputs,
    x_stride, weight_stride, HAS_DESCRIPTORS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the sums [OUTPUTS, ROWS] of a tile over the inputs of a segment."""
    sums = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    end = tl.minimum(first_input + segment_inputs, num_inputs)
    if HAS_DESCRIPTORS:
        for first in tl.range(first_input, end, INPUTS):
            a = weight.load([first_output, first])
            b = x.load([first_row, first])
            sums = tl.dot(a, tl.trans(b), sums)
    else:
        outputs = (first_output + tl.arange(0, OUTPUTS))[:, None]
        rows = (first_row + tl.arange(0, ROWS))[None, :]
        inputs = tl.arange(0, INPUTS)
        weight_rows = weight + outputs.to(tl.int64) * weight_stride + inputs[None, :]
        x_rows = x + rows.to(tl.int64) * x_stride + inputs[:, None]
        for first in tl.range(first_input, end, INPUTS):
            in_row = inputs < num_inputs - first
            a = tl.load(weight_rows + first, mask=(outputs < num_outputs) & in_row[None, :], other=0.0)
            b = tl.load(x_rows + first, mask=(rows < num_rows) & in_row[:, None], other=0.0)
            sums = tl.dot(a, b, sums)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _add_segments_kernel(
    partial, bias, out, num_rows, num_outputs, out_stride, COUNT: tl.constexpr, IS_ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the segments of a row, and round or add the result. Grid: (rows, blocks of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < num_outputs
    own = partial + row * num_outputs + columns
    distance = tl.cast(num_rows, tl.int64) * num_outputs
    result = tl.load(own, mask=is_there, other=0.0)
    for segment in tl.static_range(1, COUNT):
        result += tl.load(own + segment * distance, mask=is_there, other=0.0)
    if bias is not None:
        result += tl.load(bias + columns, mask=is_there, other=0.0).to(tl.float32)
    target = out + row * out_stride + columns
    rounded = result.to(out.dtype.element_ty)
    if IS_ADDED:
        held = tl.load(target, mask=is_there, other=0.0).to(tl.float32)
        rounded = (held + rounded.to(tl.float32)).to(rounded.dtype)
    tl.store(target, rounded, mask=is_there)
