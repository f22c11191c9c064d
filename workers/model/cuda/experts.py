"""The products of a layer's experts in Triton, of rows that are sorted by expert on the device.

No step of it looks at the routing from the host, and every tensor's size follows from the numbers of tokens
and experts alone, so a CUDA graph can hold all of it. A program multiplies a tile of rows of one expert: the
weights of an expert are read once for each tile of its rows, and those of experts without rows not at all.
The sum over a row's inputs is taken by one program in one order, and a token's experts are added in the order
of their numbers by one program: with one tile for all numbers of rows, a token's result depends on nothing
else. Products, activations and sums are float32; rounded are the activated columns, the sum, and the results
of experts with many rows each."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.experts.mixture_shape import Clamp, ExpertActivation
from workers.model.experts.routing import Routing

# The columns of a program that adds results, or computes activations alone.
_COLUMNS = 512
_TILE_ITEMS = 3


class ExpertTile(NamedTuple):
    """The division of the work: rows, outputs and inputs of a product's tile (a program of gate and up has as
    many outputs of each), Triton's options, and how many pairs a program that sorts reads at a time."""

    rows: int
    outputs: int
    inputs: int
    num_stages: int
    chunk: int


def few_rows_tile(dtype: torch.dtype) -> ExpertTile:
    """Return the tile for experts of few rows each, whose weights are all that takes time: with 48 KiB of
    them on their way, two programs a multiprocessor cover the latency of memory twice."""
    return ExpertTile(16, 32, 32, 2, 512) if dtype == torch.float32 else ExpertTile(16, 32, 128, 4, 512)


def many_rows_tile(dtype: torch.dtype) -> ExpertTile:
    """Return the tile for experts of many rows each."""
    return ExpertTile(32, 32, 32, 2, 2048) if dtype == torch.float32 else ExpertTile(64, 64, 64, 3, 2048)


class SortedRows(NamedTuple):
    """The rows of experts: one for each pair of a token and one of its places, whose number is token *
    num_chosen + place. Those of an expert follow one another, in the order of their pairs; pairs that name
    none of this rank's experts have no row.

    All int32: the `pairs` of rows [num_pairs], 0 behind the last row; the `rows` of pairs [num_pairs], or -1;
    the `ends` of the experts' rows [num_experts]; and `tiles` [num_tiles, 3], of rows of one expert each:
    the expert, the first row and the end, with an expert of -1 behind the last tile."""

    pairs: Tensor
    rows: Tensor
    ends: Tensor
    tiles: Tensor


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Return the most tiles that the rows of so many pairs fill, however they are divided over experts."""
    return num_pairs if num_pairs <= num_experts else num_experts + (num_pairs - num_experts) // tile_rows


def sort_rows(experts: Tensor, counts: Tensor, tile_rows: int, chunk: int) -> SortedRows:
    """Sort the pairs of int32 `experts` [num_tokens, num_chosen] by expert, for tiles of so many rows, and
    add the number of rows of each expert to int64 `counts` [num_experts]. A program reads `chunk` pairs at a
    time."""
    num_pairs, num_experts = experts.numel(), len(counts)
    assert experts.is_contiguous()
    assert counts.is_contiguous()
    num_tiles = most_tiles(num_pairs, num_experts, tile_rows)
    pairs, rows = experts.new_empty(num_pairs), experts.new_empty(num_pairs)
    ends, tiles = experts.new_empty(num_experts), experts.new_empty(num_tiles, _TILE_ITEMS)
    _sort_kernel[(num_experts,)](
        experts, pairs, rows, ends, tiles, counts, num_pairs, num_tiles, NUM_EXPERTS=num_experts,
        TILE_ROWS=tile_rows, BINS=triton.next_power_of_2(num_experts + 1), CHUNK=chunk, num_warps=8,
    )  # fmt: skip
    return SortedRows(pairs, rows, ends, tiles)


class GateEpilogue(NamedTuple):
    """The activation of gate and up, and the biases of both [num_experts, 2 * size], those of gates first.
    With `relu2` there are ups alone, without a bias."""

    activation: ExpertActivation
    clamp: Clamp
    bias: Tensor | None

    def size_of(self, num_outputs: int) -> int:
        """Return the activated columns of so many outputs."""
        return num_outputs if self.activation == "relu2" else num_outputs // 2


def multiply_gate_up(
    x: Tensor, weight: Tensor, gate: GateEpilogue, order: SortedRows, num_chosen: int, tile: ExpertTile
) -> Tensor:
    """Compute the activated columns [num_pairs, size] of the rows, by x [num_tokens, hidden_size] and
    `weight` [num_experts, 2 * size, hidden_size], or half as many outputs with `relu2`. Behind the last row
    they are undefined."""
    size, hidden_size = gate.size_of(weight.shape[1]), weight.shape[2]
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    assert x.shape[1] == hidden_size
    out = x.new_empty(len(order.pairs), size)
    _gate_up_kernel[(triton.cdiv(size, tile.outputs), len(order.tiles))](
        x, weight, gate.bias, out, order.pairs, order.tiles, num_chosen, x.stride(0), size, hidden_size,
        *gate.clamp, ACTIVATION=gate.activation, **_options(x.dtype, tile),
    )  # fmt: skip
    return out


def multiply_down(
    x: Tensor, weight: Tensor, order: SortedRows, tile: ExpertTile, dtype: torch.dtype
) -> Tensor:
    """Compute the products [num_pairs, hidden_size] of the rows' activated columns x [num_pairs, size] with
    `weight` [num_experts, hidden_size, size], rounded to `dtype`. Behind the last row they are undefined."""
    hidden_size, size = weight.shape[1:]
    assert weight.is_contiguous()
    assert x.is_contiguous()
    out = x.new_empty(len(x), hidden_size, dtype=dtype)
    _down_kernel[(triton.cdiv(hidden_size, 2 * tile.outputs), len(order.tiles))](
        x, weight, out, order.tiles, size, hidden_size,
        **_options(x.dtype, tile._replace(outputs=2 * tile.outputs)),
    )  # fmt: skip
    return out


def _options(dtype: torch.dtype, tile: ExpertTile) -> dict[str, object]:
    return {
        "PRECISION": "ieee" if dtype == torch.float32 else None,
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "INPUTS": tile.inputs,
        "num_warps": 4,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": False,
    }


def activate(gate_up: Tensor, gate: GateEpilogue, order: SortedRows, experts: Tensor) -> Tensor:
    """Compute the activated columns [num_pairs, size] of products `gate_up` [num_pairs, 2 * size], or
    [num_pairs, size] with `relu2`, of the rows, to which the biases of their `experts` [num_tokens,
    num_chosen] are still to be added. Behind the last row they are undefined."""
    num_rows, size = gate_up.shape[0], gate.size_of(gate_up.shape[1])
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(num_rows, size)
    _activate_kernel[(num_rows, triton.cdiv(size, _COLUMNS))](
        gate_up, gate.bias, out, order.pairs, order.ends, experts, size, *gate.clamp,
        NUM_EXPERTS=len(order.ends), ACTIVATION=gate.activation, BLOCK=_COLUMNS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def add_results(
    results: Tensor,
    order: SortedRows,
    routing: Routing,
    bias: Tensor | None,
    out: Tensor,
    *,
    is_added: bool = False,
) -> None:
    """Write the weighted sums of the `results` of the rows [num_pairs, hidden_size], and of the `bias` of
    their experts [num_experts, hidden_size], to `out` [num_tokens, hidden_size], rounded to its dtype, or add
    them there."""
    num_tokens, num_chosen = routing.experts.shape
    hidden_size = results.shape[1]
    assert out.shape == (num_tokens, hidden_size)
    assert out.stride(1) == 1
    assert results.is_contiguous()
    assert routing.weights.is_contiguous()
    assert routing.weights.dtype == torch.float32
    _add_kernel[(num_tokens, triton.cdiv(hidden_size, _COLUMNS))](
        results, order.rows, routing.experts, routing.weights, bias, out, hidden_size, out.stride(0),
        NUM_CHOSEN=num_chosen, CHOSEN=triton.next_power_of_2(num_chosen), IS_ADDED=is_added,
        BLOCK=_COLUMNS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- kernels


# One compiled kernel serves every number of pairs.
@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_kernel(
    experts, pairs, rows, ends, tiles, totals, num_pairs, num_tiles, NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the rows of one expert, which are one program: it counts all pairs, of which those of experts
    before its own say where its rows begin. The last one writes what is behind the last row and tile."""
    own = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, num_pairs, CHUNK):
        named = tl.load(experts + first + lanes, mask=first + lanes < num_pairs, other=-1)
        counts += tl.histogram(tl.where(named < 0, BINS - 1, named), BINS)
    counts = tl.where(bins < NUM_EXPERTS, counts, 0)
    row = tl.sum(tl.where(bins < own, counts, 0), 0)
    end = tl.sum(tl.where(bins <= own, counts, 0), 0)
    tile = tl.sum(tl.where(bins < own, (counts + TILE_ROWS - 1) // TILE_ROWS, 0), 0)
    tl.store(ends + own, end)
    tl.store(totals + own, tl.load(totals + own) + (end - row))
    for first in range(row, end, TILE_ROWS):
        tl.store(tiles + 3 * tile, own)
        tl.store(tiles + 3 * tile + 1, first)
        tl.store(tiles + 3 * tile + 2, tl.minimum(first + TILE_ROWS, end))
        tile += 1
    if own == NUM_EXPERTS - 1:
        for first in range(tile, num_tiles, CHUNK):
            tl.store(tiles + 3 * (first + lanes), -1, mask=first + lanes < num_tiles)
        for first in range(end, num_pairs, CHUNK):
            tl.store(pairs + first + lanes, 0, mask=first + lanes < num_pairs)
    for first in range(0, num_pairs, CHUNK):
        is_there = first + lanes < num_pairs
        named = tl.load(experts + first + lanes, mask=is_there, other=-1)
        is_own = named == own
        place = row + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pairs + place, first + lanes, mask=is_own)
        tl.store(rows + first + lanes, place, mask=is_own)
        row += tl.sum(is_own.to(tl.int32), 0)
        if own == 0:
            tl.store(rows + first + lanes, -1, mask=is_there & (named < 0))


@triton.jit
def gated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """Return the activation of gates times ups, or that of ups alone, float32."""
    if ACTIVATION == "relu2":
        gate = tl.where(up < 0.0, 0.0, up)
        result = gate * gate
    else:
        result = _times_gate(gate, up, alpha, limit, ACTIVATION)
    return result


@triton.jit
def _times_gate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    exponent = gate
    if ACTIVATION == "clamped_swiglu":
        # Comparisons keep what is no number.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        exponent = gate * alpha
    elif ACTIVATION == "gelu_tanh":  # x / 2 * (1 + tanh(y)) is x * sigmoid(2 * y)
        exponent = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
    grown = tl.exp(tl.minimum(-exponent, 88.0))  # the largest that float32 holds
    return gate / (1.0 + grown) * up


# One compiled kernel serves every number of chosen experts, so that it can be compiled before that is known.
@triton.jit(do_not_specialize=["num_chosen"])
def _gate_up_kernel(
    x, weight, bias, out, pairs, tiles, num_chosen, x_stride, size, hidden_size, alpha, limit,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    own = tiles + 3 * tl.program_id(1)
    expert = tl.load(own).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(own + 1) + tl.arange(0, ROWS)
    is_row = rows < tl.load(own + 2)
    tokens = tl.load(pairs + rows, mask=is_row, other=0) // num_chosen
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < size
    inputs = tl.arange(0, INPUTS)
    x_rows = x + tokens.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    PARTS: tl.constexpr = 1 if ACTIVATION == "relu2" else 2
    gates = weight + (PARTS * expert * size + outputs)[None, :] * hidden_size + inputs[:, None]
    ups = gates + (PARTS - 1) * size * hidden_size
    gate = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, hidden_size, INPUTS):
        in_row = inputs < hidden_size - first
        a = tl.load(x_rows + first, mask=is_row[:, None] & in_row[None, :], other=0.0)
        is_weight = is_output[None, :] & in_row[:, None]
        if PARTS == 2:
            b = tl.load(gates + first, mask=is_weight, other=0.0)
            gate = tl.dot(a, b, gate, input_precision=PRECISION)
        up = tl.dot(a, tl.load(ups + first, mask=is_weight, other=0.0), up, input_precision=PRECISION)
    if bias is not None:
        of_gates = bias + 2 * expert * size + outputs
        gate += tl.load(of_gates, mask=is_output, other=0.0).to(tl.float32)[None, :]
        up += tl.load(of_gates + size, mask=is_output, other=0.0).to(tl.float32)[None, :]
    result = gated(gate, up, alpha, limit, ACTIVATION).to(out.dtype.element_ty)
    target = out + rows.to(tl.int64)[:, None] * size + outputs[None, :]
    tl.store(target, result, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _down_kernel(
    x, weight, out, tiles, size, hidden_size, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    own = tiles + 3 * tl.program_id(1)
    expert = tl.load(own).to(tl.int64)
    if expert < 0:
        return
    rows = (tl.load(own + 1) + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    is_row = rows < tl.load(own + 2)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    is_output = outputs < hidden_size
    inputs = tl.arange(0, INPUTS)
    x_rows = x + rows * size + inputs[None, :]
    weight_rows = weight + (expert * hidden_size + outputs) * size + inputs[:, None]
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, size, INPUTS):
        in_row = inputs < size - first
        a = tl.load(x_rows + first, mask=is_row & in_row[None, :], other=0.0)
        b = tl.load(weight_rows + first, mask=is_output & in_row[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    result = sums.to(out.dtype.element_ty)
    tl.store(out + rows * hidden_size + outputs, result, mask=is_row & is_output)


@triton.jit
def _activate_kernel(
    gate_up, bias, out, pairs, ends, experts, size, alpha, limit,
    NUM_EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + NUM_EXPERTS - 1):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < size
    PARTS: tl.constexpr = 1 if ACTIVATION == "relu2" else 2
    own = gate_up + row * PARTS * size + columns
    gate = tl.load(own, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(own + (PARTS - 1) * size, mask=is_there, other=0.0).to(tl.float32)
    if bias is not None:
        expert = tl.load(experts + tl.load(pairs + row)).to(tl.int64)
        of_gates = bias + 2 * expert * size + columns
        gate += tl.load(of_gates, mask=is_there, other=0.0).to(tl.float32)
        up += tl.load(of_gates + size, mask=is_there, other=0.0).to(tl.float32)
    result = gated(gate, up, alpha, limit, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + row * size + columns, result, mask=is_there)


@triton.jit
def _add_kernel(
    results, rows, experts, weights, bias, out, hidden_size, out_stride,
    NUM_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, IS_ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add some columns of one token's results, which are one program, in the order of their rows, which is
    that of their experts' numbers."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < hidden_size
    places = tl.arange(0, CHOSEN)
    is_place = places < NUM_CHOSEN
    pair = token * NUM_CHOSEN + places
    own = tl.load(rows + pair, mask=is_place, other=-1)
    of_place = tl.load(weights + pair, mask=is_place, other=0.0)
    named = tl.load(experts + pair, mask=is_place, other=0)
    is_before = (own[None, :] < own[:, None]) & (own >= 0)[None, :]
    turns = tl.where(own >= 0, tl.sum(is_before.to(tl.int32), 1), -1)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for turn in tl.static_range(NUM_CHOSEN):
        is_turn = turns == turn
        row = tl.sum(tl.where(is_turn, own, 0), 0).to(tl.int64)
        factor = tl.sum(tl.where(is_turn, of_place, 0.0), 0)
        is_there = is_column & (tl.sum(is_turn.to(tl.int32), 0) > 0)
        result = tl.load(results + row * hidden_size + columns, mask=is_there, other=0.0).to(tl.float32)
        if bias is not None:
            expert = tl.sum(tl.where(is_turn, named, 0), 0).to(tl.int64)
            of_expert = tl.load(bias + expert * hidden_size + columns, mask=is_there, other=0.0)
            result += of_expert.to(tl.float32)
        sums += result * factor
    target = out + token * out_stride + columns
    total = sums.to(out.dtype.element_ty)
    if IS_ADDED:
        before = tl.load(target, mask=is_column, other=0.0)
        total = (before.to(tl.float32) + total.to(tl.float32)).to(total.dtype)
    tl.store(target, total, mask=is_column)
