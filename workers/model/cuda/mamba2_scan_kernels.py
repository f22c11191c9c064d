"""The states of Mamba-2 in Triton, token by token, and the norm of what heads give.

Arithmetic is that of `workers.model.state.mamba2_scan`, in float32. A program holds some columns of a head's
state while the tokens of a sequence pass: that is for sequences of few tokens in a step, and for all in
deterministic mode. Not yet validated: these kernels have run on no card."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from workers.model.state.mamba2_scan import ScanHeads

# The columns of a state that a program holds.
_COLUMNS = 32
_INDICES = ["reads", "writes", "firsts", "lengths", "groups", "starts", "widths"]
_STRIDES = ["channel_stride", "step_stride", "block_stride", "part_stride", "gate_stride"]


class ScanSequences(NamedTuple):
    """Some sequences of a step, int32 on the device [num_sequences]: their states' blocks, `NO_STATE` where
    they begin, their first tokens, and how many tokens they have. None: each has one, in their order."""

    reads: Tensor
    writes: Tensor
    firsts: Tensor | None = None
    lengths: Tensor | None = None


def scan_sequences(
    heads: ScanHeads,
    groups: Tensor,
    channels: Tensor,
    steps: Tensor,
    states: Tensor,
    sequences: ScanSequences,
    mixed: Tensor,
) -> None:
    """Write what the tokens of sequences give to `mixed` float32 [num_tokens, num_heads * head_dim], and
    continue their `states` [num_blocks, num_parts, part_size]. `groups` int32 [num_heads] are those of heads;
    the others are as in `TorchScan`."""
    has_lengths = sequences.firsts is not None
    least, most = heads.limits
    _scan_kernel[(len(sequences.reads), heads.num_heads, triton.cdiv(heads.head_dim, _COLUMNS))](
        channels, steps, heads.step_bias, heads.decay, heads.skip, groups, states[:, :, heads.num_kept :],
        sequences.reads, sequences.writes,
        sequences.reads if sequences.firsts is None else sequences.firsts,
        sequences.reads if sequences.lengths is None else sequences.lengths, mixed,
        channels.stride(0), steps.stride(0), states.stride(0), states.stride(1), least, most,
        HAS_LENGTHS=has_lengths, HEADS_PER_PART=heads.num_heads // states.shape[1], NUM_HEADS=heads.num_heads,
        NUM_GROUPS=heads.num_groups, HEAD_DIM=heads.head_dim, STATE_SIZE=heads.state_size,
        INPUTS=triton.next_power_of_2(heads.state_size), COLUMNS=_COLUMNS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def gate_and_square(x: Tensor, gate: Tensor, starts: Tensor, widths: Tensor, most: int) -> Tensor:
    """Multiply float32 x [num_tokens, num_columns], in place, by the SiLU of `gate`. Returns the sums of the
    squares of groups of columns, float32 [num_tokens, num_groups]: int32 `starts` and `widths` [num_groups]
    say where they are, and `most` is the largest width."""
    squares = x.new_empty(len(x), len(starts))
    _square_kernel[(len(x), len(starts))](
        x, gate, starts, widths, squares, x.stride(0), gate.stride(0), BLOCK=triton.next_power_of_2(most),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return squares


def scale_groups(
    x: Tensor,
    weight: Tensor,
    squares: Tensor,
    starts: Tensor,
    widths: Tensor,
    sizes: tuple[int, int, float],
    out: Tensor,
) -> Tensor:
    """Scale the groups of columns of x to unit mean square by `squares`, and multiply by `weight`; write the
    result to `out`. `sizes` are the largest width, the columns of a whole group, and what is added to the
    mean."""
    most, group_size, eps = sizes
    _scale_kernel[(len(x), len(starts))](
        x, weight, squares, starts, widths, out, x.stride(0), group_size, eps,
        BLOCK=triton.next_power_of_2(most), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_INDICES)
def _scan_kernel(
    channels, steps, step_bias, decays, skips, groups, states, reads, writes, firsts, lengths, mixed,
    channel_stride, step_stride, block_stride, part_stride, least, most,
    HAS_LENGTHS: tl.constexpr, HEADS_PER_PART: tl.constexpr, NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr, INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, heads, tiles of columns)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first, length = sequence, 1
    if HAS_LENGTHS:
        first, length = tl.load(firsts + sequence), tl.load(lengths + sequence)
    inputs = tl.arange(0, INPUTS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_input, is_column = inputs < STATE_SIZE, columns < HEAD_DIM
    is_state = is_input[:, None] & is_column[None, :]
    at = inputs[:, None] * HEAD_DIM + columns[None, :]
    own = (head // HEADS_PER_PART) * part_stride + (head % HEADS_PER_PART) * STATE_SIZE * HEAD_DIM
    read, write = tl.load(reads + sequence).to(tl.int64), tl.load(writes + sequence).to(tl.int64)
    before = states + tl.maximum(read, 0) * block_stride + own
    state = tl.load(before + at, mask=is_state & (read >= 0), other=0.0)
    decay, skip, bias = tl.load(decays + head), tl.load(skips + head), tl.load(step_bias + head)
    group = NUM_HEADS * HEAD_DIM + tl.load(groups + head) * STATE_SIZE
    for i in range(0, length):
        token = (first + i).to(tl.int64)
        row = channels + token * channel_stride
        x = tl.load(row + head * HEAD_DIM + columns, mask=is_column, other=0.0).to(tl.float32)
        b = tl.load(row + group + inputs, mask=is_input, other=0.0).to(tl.float32)
        c = tl.load(row + group + NUM_GROUPS * STATE_SIZE + inputs, mask=is_input, other=0.0).to(tl.float32)
        width = tl.load(steps + token * step_stride + head).to(tl.float32) + bias
        width = tl.where(width > 20.0, width, tl.log(1.0 + tl.exp(tl.minimum(width, 20.0))))
        width = tl.minimum(tl.maximum(width, least), most)
        state = state * tl.exp(width * decay) + b[:, None] * (x * width)[None, :]
        result = tl.sum(state * c[:, None], 0) + x * skip
        tl.store(mixed + (token * NUM_HEADS + head) * HEAD_DIM + columns, result, mask=is_column)
    tl.store(states + write * block_stride + own + at, state, mask=is_state)


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_INDICES)
def _square_kernel(x, gate, starts, widths, squares, x_stride, gate_stride, BLOCK: tl.constexpr):
    """Grid: (tokens, groups)."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    is_column = offsets < tl.load(widths + group)
    columns = tl.load(starts + group) + offsets
    factor = tl.load(gate + token * gate_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    value = tl.load(x + token * x_stride + columns, mask=is_column, other=0.0)
    value = value * (factor * tl.sigmoid(factor))
    tl.store(x + token * x_stride + columns, value, mask=is_column)
    tl.store(squares + token * tl.num_programs(1) + group, tl.sum(value * value, 0))


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_INDICES)
def _scale_kernel(x, weight, squares, starts, widths, out, x_stride, group_size, eps, BLOCK: tl.constexpr):
    """Grid: (tokens, groups)."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    is_column = offsets < tl.load(widths + group)
    columns = tl.load(starts + group) + offsets
    scale = tl.rsqrt(tl.load(squares + token * tl.num_programs(1) + group) / group_size + eps)
    value = tl.load(x + token * x_stride + columns, mask=is_column, other=0.0) * scale
    value = value * tl.load(weight + columns, mask=is_column, other=0.0)
    tl.store(out + token * x_stride + columns, value.to(out.dtype.element_ty), mask=is_column)
