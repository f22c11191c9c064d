"""The operations of a decoder layer between its products, in Triton: norms, residual, rotation and KV write,
SiLU.

The kernels round where `workers.model.decoder` and `workers.model.attention.torch_backend` do: every value is
float32 within an operation and has the model's dtype between two. Without fused multiply-adds, which round
once less. A row's result depends on nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.attention.quantized_kv import is_quantized, quantized_parts
from workers.model.cuda.kv_elements import (
    ELEMENTS,
    SCALE,
    magnitude_bits,
    narrowed,
    raw_elements,
    scale_of,
)
from workers.model.norm import Norm

_COLUMNS = 1024
_MOST_HEADS = 8
# The arguments of which a program reads few items. They are parts of one upload, whose alignments differ from
# step to step: kernels for each combination would be compiled in the middle of serving.
_INDICES = ["tables", "slots", "positions"]


def rms_norm(hidden: Tensor, norm: Norm, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Add `residual` to `hidden` [num_rows, size], in place, where it is given; scale to unit mean square,
    and multiply by the norm's weight. The result is written to `out` where it is given, which may not be
    `hidden` if there is a residual."""
    result = torch.empty_like(hidden) if out is None else out
    _launch_norm(hidden, norm, result, residual)
    return result


def add_normed(hidden: Tensor, x: Tensor, norm: Norm) -> None:
    """Add the norm of `x` [num_rows, size] to `hidden` [num_rows, size], in place."""
    _launch_norm(x, norm, hidden, None, is_added=True)


def _launch_norm(
    hidden: Tensor, norm: Norm, result: Tensor, residual: Tensor | None, *, is_added: bool = False
) -> None:
    num_rows, size = hidden.shape
    assert result.shape == hidden.shape
    assert hidden.stride(1) == result.stride(1) == norm.weight.stride(0) == 1
    assert residual is None or (residual.stride(1) == 1 and residual.shape == hidden.shape)
    if not num_rows:
        return
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        hidden, residual, norm.weight, result, hidden.stride(0),
        residual.stride(0) if residual is not None else 0, result.stride(0), size, norm.eps,
        HAS_RESIDUAL=residual is not None, ROUNDS_FIRST=norm.is_rounded_first, IS_ADDED=is_added,
        BLOCK=block, num_warps=_num_warps(block), enable_fp_fusion=False,
    )  # fmt: skip


def gate_mul(gate_up: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """Compute activation(gate) * up of `gate_up` [num_rows, 2 * size], whose first half of columns is gate.
    The activation is "silu" or "gelu_tanh"."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(num_rows, size) if out is None else out
    assert gate_up.stride(1) == result.stride(1) == 1
    if not num_rows:
        return result
    _gate_mul_kernel[(num_rows, triton.cdiv(size, _COLUMNS))](
        gate_up, result, gate_up.stride(0), result.stride(0), size, IS_GELU=activation == "gelu_tanh",
        BLOCK=_COLUMNS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return result


def rotate_and_write(
    qkv: Tensor,
    kv_layer: Tensor,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    is_written: bool = True,
) -> Tensor:
    """Normalize, if there are norms of heads, and rotate queries and keys of `qkv` [num_tokens, (num_heads
    + 2 * num_kv_heads) * head_dim], the queries in place, and write keys and values to their blocks. Unless
    that is done, `qkv` has queries alone.

    `kv_layer` is `kv[:, layer]`, [num_blocks, 2, num_kv_heads, block_tokens, head_dim], with the bytes of
    scales if it is quantized. Token i is at
    `positions[i]` of the sequence whose block table is row `slots[i]` of `tables` [num_slots, max_blocks].
    `cos` and `sin` are those of `workers.model.attention.rotary.rope_table`. Returns the queries, a
    view of `qkv`, [num_tokens, num_heads, head_dim]."""
    num_tokens = qkv.shape[0]
    kept, scales = (kv_layer, kv_layer) if not is_quantized(kv_layer) else quantized_parts(kv_layer)
    _, _, num_kv_heads, block_tokens, head_dim = kept.shape
    num_kv_heads = num_kv_heads if is_written else 0
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert (q_norm is None) == (k_norm is None)
    assert qkv.stride(1) == kept.stride(4) == tables.stride(1) == 1
    assert slots.is_contiguous()
    assert positions.is_contiguous()
    assert cos.shape == sin.shape == (num_tokens, 1, head_dim)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    heads = min(_MOST_HEADS, triton.next_power_of_2(num_heads + 2 * num_kv_heads))
    half = triton.next_power_of_2(head_dim // 2)
    weights: tuple[Tensor | None, Tensor | None] = (None, None)
    eps, is_rounded_first = 0.0, True
    if q_norm is not None and k_norm is not None:
        assert (q_norm.eps, q_norm.is_rounded_first) == (k_norm.eps, k_norm.is_rounded_first)
        weights, eps, is_rounded_first = (q_norm.weight, k_norm.weight), q_norm.eps, q_norm.is_rounded_first
    if num_tokens:
        _rotate_and_write_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
            qkv, raw_elements(kept), scales, tables, slots, positions, cos, sin, *weights,
            qkv.stride(0), *kept.stride()[:4], tables.stride(0), eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_TOKENS=block_tokens,
            HAS_NORM=q_norm is not None, ROUNDS_FIRST=is_rounded_first, HEADS=heads, HALF=half,
            ELEMENTS=ELEMENTS.get(kept.dtype, 0),
            num_warps=_num_warps(heads * half), enable_fp_fusion=False,
        )  # fmt: skip
    return qkv[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)


def _num_warps(num_items: int) -> int:
    """Return a number of warps with about 16 items a thread."""
    return min(16, max(1, num_items // 512))


# ---------------------------------------------------------------------------------------------- kernels


@triton.jit
def _rms_norm_kernel(
    hidden, residual, weight, out, hidden_stride, residual_stride, out_stride, size, eps,
    HAS_RESIDUAL: tl.constexpr, ROUNDS_FIRST: tl.constexpr, IS_ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_there = columns < size
    own = hidden + row * hidden_stride + columns
    x = tl.load(own, mask=is_there, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + row * residual_stride + columns, mask=is_there, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(own, x, mask=is_there)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    scaled = wide * scale
    if ROUNDS_FIRST:
        scaled = scaled.to(x.dtype).to(tl.float32)
    factors = tl.load(weight + columns, mask=is_there, other=0.0)
    result = (scaled * factors).to(x.dtype)
    target = out + row * out_stride + columns
    if IS_ADDED:
        held = tl.load(target, mask=is_there, other=0.0).to(tl.float32)
        result = (held + result.to(tl.float32)).to(x.dtype)
    tl.store(target, result, mask=is_there)


@triton.jit
def activated(gate, IS_GELU: tl.constexpr):
    """Return the activation of gates, rounded to their dtype, in float32."""
    wide = gate.to(tl.float32)
    exponent = wide
    if IS_GELU:  # x / 2 * (1 + tanh(y)) is x * sigmoid(2 * y)
        exponent = 1.5957691216 * (wide + 0.044715 * wide * wide * wide)
    grown = tl.exp(tl.minimum(-exponent, 88.0))  # the largest that float32 holds
    return (wide / (1.0 + grown)).to(gate.dtype).to(tl.float32)


@triton.jit
def _gate_mul_kernel(gate_up, out, in_stride, out_stride, size, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < size
    gate = tl.load(gate_up + row * in_stride + columns, mask=is_there, other=0.0)
    up = tl.load(gate_up + row * in_stride + size + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, (activated(gate, IS_GELU) * up).to(gate.dtype), mask=is_there)


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _rotate_and_write_kernel(
    qkv, kv, scales, tables, slots, positions, cos, sin, q_norm, k_norm,
    qkv_stride, block_stride, kind_stride, head_stride, token_stride, table_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Rotate and write `HEADS` heads of queries, keys and values of one token, which are one program; a row
    of a tile has the first or the second half of a head."""
    token = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    in_half = columns < HEAD_DIM // 2
    is_there = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half
    own = qkv + token.to(tl.int64) * qkv_stride + heads * HEAD_DIM + columns
    given_first = tl.load(own, mask=is_there, other=0.0)
    given_second = tl.load(own + HEAD_DIM // 2, mask=is_there, other=0.0)
    dtype = given_first.dtype
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    first, second = given_first.to(tl.float32), given_second.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        first, second = first * scale, second * scale
        if ROUNDS_FIRST:
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        of_query = tl.load(q_norm + columns, mask=in_half, other=0.0)
        of_key = tl.load(k_norm + columns, mask=in_half, other=0.0)
        first = (first * tl.where(is_query, of_query, of_key)).to(dtype).to(tl.float32)
        of_query = tl.load(q_norm + HEAD_DIM // 2 + columns, mask=in_half, other=0.0)
        of_key = tl.load(k_norm + HEAD_DIM // 2 + columns, mask=in_half, other=0.0)
        second = (second * tl.where(is_query, of_query, of_key)).to(dtype).to(tl.float32)
    angles = token.to(tl.int64) * HEAD_DIM + columns
    c = tl.load(cos + angles, mask=in_half, other=0.0).to(tl.float32)
    s = tl.load(sin + HEAD_DIM // 2 + angles, mask=in_half, other=0.0).to(tl.float32)
    rotated_first = ((first * c).to(dtype).to(tl.float32) - second * s).to(dtype)
    rotated_second = ((second * c).to(dtype).to(tl.float32) + first * s).to(dtype)
    rotated_first = tl.where(is_value, given_first, rotated_first)
    rotated_second = tl.where(is_value, given_second, rotated_second)

    tl.store(own, rotated_first, mask=is_there & is_query)
    tl.store(own + HEAD_DIM // 2, rotated_second, mask=is_there & is_query)
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    block = tl.load(tables + slot * table_stride + position // BLOCK_TOKENS).to(tl.int64)
    kv_head = heads - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
    place = kv + block * block_stride + (position % BLOCK_TOKENS) * token_stride
    written = place + tl.where(is_value, kind_stride, 0) + kv_head * head_stride + columns
    is_written = is_there & (heads >= NUM_HEADS)
    if ELEMENTS != 0:
        wide_first, wide_second = rotated_first.to(tl.float32), rotated_second.to(tl.float32)
        bits = tl.maximum(magnitude_bits(wide_first), magnitude_bits(wide_second))
        inverse, scale = scale_of(tl.max(tl.where(is_there, bits, 0), 1)[:, None], ELEMENTS)
        of_head = (tl.where(is_value, kind_stride, 0) + kv_head * head_stride) // SCALE
        own_scale = scales + block * (block_stride // SCALE) + of_head + position % BLOCK_TOKENS
        is_head = (heads >= NUM_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
        tl.store(own_scale, scale, mask=is_head)
        is_kept = inverse > 0
        rotated_first = narrowed(tl.where(is_kept, wide_first, 0.0) * inverse, ELEMENTS)
        rotated_second = narrowed(tl.where(is_kept, wide_second, 0.0) * inverse, ELEMENTS)
    tl.store(written, rotated_first, mask=is_written)
    tl.store(written + HEAD_DIM // 2, rotated_second, mask=is_written)
