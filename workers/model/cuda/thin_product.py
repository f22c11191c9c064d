"""Products in Triton of few rows, up to 32, with a norm before them and what follows them in one kernel.

Such a product is bound by memory: each weight is read once, for a few rows. Libraries read it well, but a
layer that decodes has a norm, a product and an activation as three kernels, each of which begins and ends
with an idle device. Here one kernel does all three, or a product and the addition to the hidden states:

- Norm. The rows are multiplied by the norm's weight on the way to the tensor cores, while their squares are
  added up, and the sums of products are multiplied by the rows' scales at the end. So a row is rounded once,
  after the norm's weight, where `workers.model.norm.Norm` rounds it once or twice. The scale is not known
  before the last input, so float16, whose exponents end at 65,504, has no such norm.
- Gate. A program computes gates and the values beside them, and stores activation(gate) * up.
- Segments. The inputs of a weight of few outputs are cut into segments, a program each, so that all
  multiprocessors read. The last program of a tile to end adds the segments, in their order whichever came
  last: equal calls have equal bits. No second kernel is needed, and no atomic addition of floats.

`thin_plan` chooses the division of the work by a model of its time. Rows are the left factor of a tile's
product, whose instructions are those of a warp on every card, and the weight's part is copied to shared
memory ahead. There is one tile of 32 rows, of which those that are not there are not read: a row has the same
bits beside any others. It has other bits in torch's product of more rows, so `deterministic: true` does not
use this. Not yet validated on a card."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.cuda.card import Card
from workers.model.cuda.layer_ops import activated
from workers.model.cuda.quantized_product import Segments
from workers.model.finish import Finish
from workers.model.norm import Norm

DTYPES, NORM_DTYPES = (torch.bfloat16, torch.float16), (torch.bfloat16,)
# The rows of a tile, the most of a product.
MOST_ROWS = 32
# The inputs of a step of a tile, 256 bytes of a row, and the fewest steps of a segment.
INPUTS, _LEAST_STEPS = 128, 4
_OUTPUTS, _MOST_SEGMENTS, _NUM_WARPS = (16, 32, 64, 128), 8, 4
_LEAST_STAGES, _MOST_STAGES = 3, 8
# The bytes that a multiprocessor's share of the memory's bandwidth is in a microsecond, by compute
# capability: of an A100, a large card for workstations before and after Hopper, an H200 and a B200. Of
# others, that of the next smaller one.
_CAPABILITY_TO_SHARE = {80: 18_000, 86: 10_000, 89: 7_000, 90: 36_000, 100: 54_000, 120: 10_000}
# How many shares a multiprocessor can read, while others read less.
_MOST_SHARES = 1.5
# The microseconds until a byte is there, and from the stores of one program until another has loaded them.
_LATENCY_US, _EXCHANGE_US = 1.0, 1.5
# The rate of the L2 cache over that of memory.
_CACHE_RATE = 2
# The most programs of a multiprocessor that are planned for, and the shared memory that each has of its own.
_MOST_RESIDENT, _OWN_BYTES = 2, 1024


class ThinPlan(NamedTuple):
    """The division of the work: the outputs of a tile, the segments of the inputs, and Triton's number of
    stages."""

    outputs: int
    segments: Segments
    num_stages: int


class ThinShape(NamedTuple):
    """The sizes of a product: `num_outputs` results of a row, each of `num_parts` outputs of the weight (2
    with a gate)."""

    num_outputs: int
    num_inputs: int
    num_parts: int = 1


def thin_plan(shape: ThinShape, card: Card, num_multiprocessors: int) -> ThinPlan:
    """Return the plan of the least `product_us`; of equal ones, that of the fewest segments and the largest
    tile."""

    def rank(plan: ThinPlan) -> tuple[float, int, int]:
        time_us = product_us(shape, plan, card, num_multiprocessors)
        return time_us, plan.segments.num_segments, -plan.outputs

    return min(_plans(shape, card), key=rank)


def _plans(shape: ThinShape, card: Card) -> Iterator[ThinPlan]:
    """Yield the plans that are considered: those that fit in shared memory, whose segments are not shorter
    than a pipeline needs."""
    num_steps = triton.cdiv(shape.num_inputs, INPUTS)
    divisions = itertools.product(_OUTPUTS, range(1, _MOST_SEGMENTS + 1), range(1, _MOST_RESIDENT + 1))
    for outputs, count, num_resident in divisions:
        if outputs * shape.num_parts > _OUTPUTS[-1] or (count > 1 and num_steps // count < _LEAST_STEPS):
            continue
        steps = triton.cdiv(num_steps, count)
        segments = Segments(steps * INPUTS, triton.cdiv(num_steps, steps))
        most_bytes = card.shared_bytes // num_resident - _OWN_BYTES
        num_stages = min(_MOST_STAGES, 1 + most_bytes // _stage_bytes(shape, outputs))
        if num_stages >= _LEAST_STAGES and segments.num_segments == count:
            yield ThinPlan(outputs, segments, num_stages)


def _stage_bytes(shape: ThinShape, outputs: int) -> int:
    """Return the shared memory of a step that is copied ahead: of weights and rows in 16 bits and the norm's
    weight. The step that is computed lies in the memory of the one before."""
    return INPUTS * (2 * (outputs * shape.num_parts + MOST_ROWS) + 4)


def product_us(shape: ThinShape, plan: ThinPlan, card: Card, num_multiprocessors: int) -> float:
    """Return how many microseconds a plan takes by a model of bytes and of waves of programs.

    In each wave, of up to two programs for each multiprocessor, the programs read their weights at the rate
    of the bytes that they have on their way, at most that of the memory and one and a half times the share of
    the multiprocessors that have a program. They read their rows, and exchange the sums of segments, in the
    L2 cache."""
    weight_bytes = 2 * plan.outputs * shape.num_parts * plan.segments.num_inputs
    cached_bytes = 2 * MOST_ROWS * plan.segments.num_inputs
    num_segments = plan.segments.num_segments
    if num_segments > 1:
        cached_bytes += 2 * 4 * MOST_ROWS * plan.outputs * shape.num_parts
    under_way_bytes = (plan.num_stages - 1) * 2 * plan.outputs * shape.num_parts * INPUTS
    share = _CAPABILITY_TO_SHARE[max(it for it in _CAPABILITY_TO_SHARE if it <= max(card.capability, 80))]
    num_programs = triton.cdiv(shape.num_outputs, plan.outputs) * num_segments
    total_us = _LATENCY_US + (_EXCHANGE_US if num_segments > 1 else 0.0)
    program_bytes = (plan.num_stages - 1) * _stage_bytes(shape, plan.outputs) + _OWN_BYTES
    num_resident = min(_MOST_RESIDENT, card.shared_bytes // program_bytes)
    while num_programs > 0:
        in_wave = min(num_programs, num_resident * num_multiprocessors)
        busy = min(in_wave, num_multiprocessors)
        rate = min(
            share * num_multiprocessors, _MOST_SHARES * share * busy, in_wave * under_way_bytes / _LATENCY_US
        )
        cache_rate = _CACHE_RATE * share * num_multiprocessors
        total_us += in_wave * (weight_bytes / rate + cached_bytes / cache_rate)
        num_programs -= in_wave
    return total_us


def allocate_arrivals(num_outputs: int, device: torch.device) -> Tensor:
    """Return the counts of programs that have ended, of the tiles of a product with so many results of a row:
    zeros, which each product leaves as zeros. Products that run at the same time need their own."""
    return torch.zeros(triton.cdiv(num_outputs, _OUTPUTS[0]), dtype=torch.int32, device=device)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    arrivals: Tensor,
    plan: ThinPlan,
    *,
    norm: Norm | None = None,
    finish: Finish = "store",
) -> None:
    """Write the product of x [num_rows, num_inputs], or of its RMS norm, `weight` [num_weight_rows,
    num_inputs] and `bias` [num_weight_rows] to `out` [num_rows, num_outputs], rounded to its dtype; add it
    there; or, with a gate, write activation(gate) * up of a weight whose first half of rows is gate. Sums are
    float32."""
    (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
    is_gated = finish in ("silu", "gelu_tanh")
    assert x.dtype == weight.dtype
    assert x.dtype in DTYPES
    assert weight.shape == (num_outputs * (2 if is_gated else 1), num_inputs)
    assert len(out) == num_rows <= MOST_ROWS
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    assert norm is None or (x.dtype in NORM_DTYPES and not norm.is_layer_norm)
    if not num_rows:
        return
    num_tiles, num_segments = triton.cdiv(num_outputs, plan.outputs), plan.segments.num_segments
    sums = squares = arrivals  # not used by one segment
    if num_segments > 1:
        shape = (num_segments, num_tiles, 2 if is_gated else 1, MOST_ROWS, plan.outputs)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        squares = torch.empty(num_segments, num_tiles, MOST_ROWS, dtype=torch.float32, device=x.device)
    _thin_product_kernel[(num_tiles, num_segments)](
        x, weight, bias, None if norm is None else norm.weight, sums, squares, arrivals, out,
        num_rows, num_outputs, num_inputs, plan.segments.num_inputs, x.stride(0), weight.stride(0),
        out.stride(0), 0.0 if norm is None else norm.eps, HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None, FINISH=finish, NUM_SEGMENTS=num_segments, ROWS=MOST_ROWS,
        OUTPUTS=plan.outputs, INPUTS=INPUTS, num_warps=_NUM_WARPS, num_stages=plan.num_stages,
        enable_fp_fusion=False,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- kernels


# One compiled kernel serves every number of rows of a tile.
@triton.jit(do_not_specialize=["num_rows"])
def _thin_product_kernel(
    x, weight, bias, norm, sums, squares, arrivals, out,
    num_rows, num_outputs, num_inputs, segment_inputs, x_stride, weight_stride, out_stride, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, FINISH: tl.constexpr, NUM_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of outputs, or a segment of it. Grid: (tiles, segments)."""
    tile, segment = tl.program_id(0), tl.program_id(1)
    is_gated: tl.constexpr = FINISH == "silu" or FINISH == "gelu_tanh"
    first_input = segment * segment_inputs
    end = tl.minimum(first_input + segment_inputs, num_inputs)
    rows, inputs = tl.arange(0, ROWS)[:, None], tl.arange(0, INPUTS)[None, :]
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    is_row, is_output = rows < num_rows, outputs < num_outputs
    x_rows = x + rows.to(tl.int64) * x_stride + inputs
    weight_rows = weight + outputs.to(tl.int64) * weight_stride + inputs
    up_rows = weight_rows + tl.cast(num_outputs, tl.int64) * weight_stride
    result = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    ups = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    square = tl.zeros((ROWS, INPUTS), dtype=tl.float32)
    for first in tl.range(first_input, end, INPUTS):
        in_row = inputs < num_inputs - first
        values = tl.load(x_rows + first, mask=is_row & in_row, other=0.0)
        if HAS_NORM:
            factors = tl.load(norm + first + inputs, mask=in_row, other=0.0)
            wide = values.to(tl.float32)
            square += wide * wide
            values = (wide * factors).to(values.dtype)
        weights = tl.load(weight_rows + first, mask=is_output & in_row, other=0.0)
        result = tl.dot(values, tl.trans(weights), result)
        if is_gated:
            weights = tl.load(up_rows + first, mask=is_output & in_row, other=0.0)
            ups = tl.dot(values, tl.trans(weights), ups)
    row_squares = tl.sum(square, 1)
    if NUM_SEGMENTS == 1:
        _finish(
            result, ups, row_squares, bias, out, tile, num_rows, num_outputs, num_inputs, out_stride, eps,
            HAS_BIAS, HAS_NORM, FINISH, ROWS, OUTPUTS,
        )  # fmt: skip
    else:
        num_tiles = tl.num_programs(0)
        own = (segment.to(tl.int64) * num_tiles + tile) * ((2 if is_gated else 1) * ROWS * OUTPUTS)
        places = sums + rows * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        square_places = squares + tl.arange(0, ROWS)
        tl.store(places + own, result, mask=is_row)
        if is_gated:
            tl.store(places + own + ROWS * OUTPUTS, ups, mask=is_row)
        if HAS_NORM:
            tl.store(square_places + (segment * num_tiles + tile) * ROWS, row_squares)
        # All threads have stored before one of them says so, with the semantics of a release.
        tl.debug_barrier()
        num_before = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if num_before == NUM_SEGMENTS - 1:
            tl.store(arrivals + tile, 0)
            distance = tl.cast(num_tiles, tl.int64) * ((2 if is_gated else 1) * ROWS * OUTPUTS)
            own = tile.to(tl.int64) * ((2 if is_gated else 1) * ROWS * OUTPUTS)
            result = _exchanged(places + own, distance, is_row, NUM_SEGMENTS)
            if is_gated:
                ups = _exchanged(places + own + ROWS * OUTPUTS, distance, is_row, NUM_SEGMENTS)
            if HAS_NORM:
                own_squares = square_places + tile * ROWS
                row_squares = _exchanged(
                    own_squares, num_tiles * ROWS, tl.arange(0, ROWS) < num_rows, NUM_SEGMENTS
                )
            _finish(
                result, ups, row_squares, bias, out, tile, num_rows, num_outputs, num_inputs, out_stride, eps,
                HAS_BIAS, HAS_NORM, FINISH, ROWS, OUTPUTS,
            )  # fmt: skip


@triton.jit
def _exchanged(places, distance, is_there, NUM_SEGMENTS: tl.constexpr):
    """Return the sum of what the programs of all segments have stored, from the L2 cache, where all have."""
    total = tl.load(places, mask=is_there, other=0.0, cache_modifier=".cg")
    for segment in tl.static_range(1, NUM_SEGMENTS):
        total += tl.load(places + segment * distance, mask=is_there, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _finish(
    sums, ups, row_squares, bias, out, tile, num_rows, num_outputs, num_inputs, out_stride, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, FINISH: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Scale the sums [ROWS, OUTPUTS] of a tile, and of what is multiplied by gates, and write the results."""
    rows = tl.arange(0, ROWS)[:, None]
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    is_there = (rows < num_rows) & (outputs < num_outputs)
    is_gated: tl.constexpr = FINISH == "silu" or FINISH == "gelu_tanh"
    if HAS_NORM:
        scale = tl.rsqrt(row_squares / num_inputs + eps)[:, None]
        sums *= scale
        ups *= scale
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    result = sums.to(dtype)
    target = out + rows.to(tl.int64) * out_stride + outputs
    if is_gated:
        if HAS_BIAS:
            ups += tl.load(bias + num_outputs + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
        result = (activated(result, FINISH == "gelu_tanh") * ups.to(dtype).to(tl.float32)).to(dtype)
    if FINISH == "add":
        held = tl.load(target, mask=is_there, other=0.0).to(tl.float32)
        result = (held + result.to(tl.float32)).to(dtype)
    tl.store(target, result, mask=is_there)
