"""The convolution of layers with a state in Triton: one pass over channels, and one that leaves the last
inputs in the states.

Arithmetic is that of `workers.model.state.causal_conv`. Not yet validated: these kernels have run on no card.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The channels of a program.
_CHANNELS = 256
_INDICES = ["reads", "writes", "firsts", "lengths", "sequences", "homes", "kept_channels", "kept_places"]
_STRIDES = ["x_stride", "block_stride", "row_stride"]


class ConvChannels(NamedTuple):
    """The channels of a convolution on the device: `taps` float32 [num_taps, num_channels] and a bias
    [num_channels], or none; `homes` int32 [num_channels] are the places in a block of states where the first
    row of each is read, and `kept_channels` and `kept_places` int32 [num_kept] all places where one is
    left. Rows are `row_stride` apart."""

    taps: Tensor
    bias: Tensor | None
    homes: Tensor
    kept_channels: Tensor
    kept_places: Tensor
    row_stride: int
    is_activated: bool


class ConvRows(NamedTuple):
    """The rows of a step, int32 on the device: the blocks that sequences read and write, and unless each has
    one token, in their order, the first row and the length of each [num_sequences], and the sequence of each
    row [num_tokens]."""

    reads: Tensor
    writes: Tensor
    firsts: Tensor | None = None
    lengths: Tensor | None = None
    sequences: Tensor | None = None


def convolve(x: Tensor, states: Tensor, channels: ConvChannels, rows: ConvRows) -> Tensor:
    """Convolve x [num_tokens, num_channels] after what `states`, float32 in blocks, have of it, and leave the
    last inputs in them. Returns a tensor like x."""
    num_taps, num_channels = channels.taps.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    has_lengths = rows.firsts is not None
    of_rows = [rows.reads if it is None else it for it in (rows.firsts, rows.lengths, rows.sequences)]
    bias = channels.taps if channels.bias is None else channels.bias
    options = {"HAS_LENGTHS": has_lengths, "NUM_TAPS": num_taps, "CHANNELS": _CHANNELS}
    _convolve_kernel[(len(x), triton.cdiv(num_channels, _CHANNELS))](
        x, states, channels.taps, bias, channels.homes, rows.reads, *of_rows, out,
        num_channels, x.stride(0), states.stride(0), channels.row_stride,
        HAS_BIAS=channels.bias is not None, IS_ACTIVATED=channels.is_activated, **options,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    num_kept = len(channels.kept_channels)
    _keep_kernel[(len(rows.reads), triton.cdiv(num_kept, _CHANNELS))](
        x, states, channels.kept_channels, channels.kept_places, rows.reads, rows.writes, *of_rows[:2],
        num_kept, x.stride(0), states.stride(0), channels.row_stride, **options,
        ROWS=triton.next_power_of_2(num_taps - 1), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_INDICES)
def _convolve_kernel(
    x, states, taps, bias, homes, reads, firsts, lengths, sequences, out,
    num_channels, x_stride, block_stride, row_stride,
    HAS_BIAS: tl.constexpr, IS_ACTIVATED: tl.constexpr, HAS_LENGTHS: tl.constexpr, NUM_TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, tiles of channels)."""
    token = tl.program_id(0).to(tl.int64)
    sequence, place = token, 0
    if HAS_LENGTHS:
        sequence = tl.load(sequences + token).to(tl.int64)
        place = (token - tl.load(firsts + sequence)).to(tl.int32)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < num_channels
    block = tl.load(reads + sequence).to(tl.int64)
    home = states + tl.maximum(block, 0) * block_stride + tl.load(homes + channels, mask=is_channel, other=0)
    total = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(NUM_TAPS):
        back: tl.constexpr = NUM_TAPS - 1 - tap
        is_here = place >= back
        here = tl.load(x + (token - back) * x_stride + channels, mask=is_channel & is_here, other=0.0)
        row = tl.maximum(NUM_TAPS - 1 + place - back, 0) * row_stride
        kept = tl.load(home + row, mask=is_channel & (place < back) & (block >= 0), other=0.0)
        weight = tl.load(taps + tap * num_channels + channels, mask=is_channel, other=0.0)
        total = total + tl.where(is_here, here.to(tl.float32), kept) * weight
    if HAS_BIAS:
        total = total + tl.load(bias + channels, mask=is_channel, other=0.0)
    dtype = out.dtype.element_ty
    if IS_ACTIVATED:
        total = total.to(dtype).to(tl.float32)
        total = total * tl.sigmoid(total)
    tl.store(out + token * num_channels + channels, total.to(dtype), mask=is_channel)


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_INDICES)
def _keep_kernel(
    x, states, kept_channels, kept_places, reads, writes, firsts, lengths,
    num_kept, x_stride, block_stride, row_stride,
    HAS_LENGTHS: tl.constexpr, NUM_TAPS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, tiles of what is kept). A program reads all rows before it writes any: both may be of
    one block."""
    sequence = tl.program_id(0).to(tl.int64)
    first, length = sequence, 1
    if HAS_LENGTHS:
        first, length = tl.load(firsts + sequence).to(tl.int64), tl.load(lengths + sequence)
    places = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    rows = tl.arange(0, ROWS)
    is_kept = (rows < NUM_TAPS - 1)[:, None] & (places < num_kept)[None, :]
    channels = tl.load(kept_channels + places, mask=places < num_kept, other=0)
    at = tl.load(kept_places + places, mask=places < num_kept, other=0)
    read, write = tl.load(reads + sequence).to(tl.int64), tl.load(writes + sequence).to(tl.int64)
    token = length - (NUM_TAPS - 1) + rows
    is_here = (token >= 0)[:, None]
    here = tl.load(
        x + (first + token)[:, None] * x_stride + channels[None, :], mask=is_kept & is_here, other=0.0
    )
    before = tl.maximum(token + NUM_TAPS - 1, 0)[:, None] * row_stride + at[None, :]
    old = states + tl.maximum(read, 0) * block_stride + before
    kept = tl.load(old, mask=is_kept & (token < 0)[:, None] & (read >= 0), other=0.0)
    value = tl.where(is_here, here.to(tl.float32), kept)
    tl.store(states + write * block_stride + rows[:, None] * row_stride + at[None, :], value, mask=is_kept)
