"""The gated delta rule in Triton: token by token, and in chunks, with the gated norm that follows both.

Arithmetic is that of `workers.model.state.delta_rule`, in float32. A program holds some columns of a value
head's state: columns are independent but for what keys and queries have in common. Chunks first have the
inverse of their triangular system computed, all at once, and then run one after another. Tokens one by one
are for steps of few tokens, and for deterministic mode. Not yet validated: these kernels have run on no card.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.norm import Norm
from workers.model.state.delta_rule import CHUNK_TOKENS, LENGTH_EPS, DeltaRows, DeltaWeights
from workers.model.state.delta_shape import DeltaHeads

# The columns of a state that a program holds.
_COLUMNS = 32
# The arguments of which a program reads few items, as in `workers.model.cuda.layer_ops`.
_INDICES = ["reads", "writes", "firsts", "lengths", "first_chunks", "chunk_tokens", "chunk_lengths"]
_STRIDES = ["channel_stride", "beta_stride", "decay_stride"]


class DeltaSequences(NamedTuple):
    """Some sequences of a step, int32 on the device [num_sequences]: their states' blocks, `NO_STATE` where
    they begin, their first tokens, and how many tokens they have. None: each has one, in their order."""

    reads: Tensor
    writes: Tensor
    firsts: Tensor | None = None
    lengths: Tensor | None = None


class DeltaChunks(NamedTuple):
    """The chunks of these sequences, one sequence after another, int32 on the device: the number of each
    sequence's first chunk [num_sequences], each chunk's first token and how many it has [num_chunks]."""

    firsts: Tensor
    tokens: Tensor
    lengths: Tensor


def run_tokens(
    heads: DeltaHeads,
    weights: DeltaWeights,
    rows: DeltaRows,
    states: Tensor,
    sequences: DeltaSequences,
    mixed: Tensor,
) -> None:
    """Write the outputs of sequences to `mixed` float32 [num_tokens, num_value_heads, value_dim], computed
    token by token, and continue their `states`, which are as in `run_delta_rule`."""
    has_lengths = sequences.firsts is not None
    grid = (len(sequences.reads), heads.num_value_heads, triton.cdiv(heads.value_dim, _COLUMNS))
    _token_kernel[grid](
        *_operands(weights, rows), states, sequences.reads, sequences.writes,
        sequences.firsts if has_lengths else sequences.reads,
        sequences.lengths if has_lengths else sequences.reads, mixed,
        *_strides(rows, states), heads.key_dim**-0.5, HAS_LENGTHS=has_lengths, **_sizes(heads, states),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def run_chunks(
    heads: DeltaHeads,
    weights: DeltaWeights,
    rows: DeltaRows,
    states: Tensor,
    sequences: DeltaSequences,
    chunks: DeltaChunks,
    mixed: Tensor,
) -> None:
    """Do the same as `run_tokens`, in chunks of `CHUNK_TOKENS`."""
    num_chunks, num_heads = len(chunks.tokens), heads.num_value_heads
    inverses = mixed.new_empty(num_chunks, num_heads, CHUNK_TOKENS, CHUNK_TOKENS)
    strides, sizes = _strides(rows, states), _sizes(heads, states)
    # Three products of parts are nearly as exact as one of float32, for which there are no tensor cores.
    precision = "tf32x3" if rows.channels.dtype == torch.float32 else "tf32"
    options = {"CHUNK": CHUNK_TOKENS, "PRECISION": precision, "num_stages": 1, "enable_fp_fusion": False}
    _inverse_kernel[(num_chunks, num_heads)](
        *_operands(weights, rows), chunks.tokens, chunks.lengths, inverses, *strides[:3], **sizes, **options,
        num_warps=4,
    )  # fmt: skip
    _chunk_kernel[(len(sequences.reads), num_heads, triton.cdiv(heads.value_dim, _COLUMNS))](
        *_operands(weights, rows), states, sequences.reads, sequences.writes, sequences.firsts,
        sequences.lengths, chunks.firsts, inverses, mixed, *strides, heads.key_dim**-0.5, **sizes, **options,
        num_warps=4,
    )  # fmt: skip


def gated_norm(mixed: Tensor, gates: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
    """Compute `workers.model.state.delta_rule.gated_norm`; the result is written to `out` where it is
    given."""
    num_tokens, num_heads, value_dim = mixed.shape
    result = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device) if out is None else out
    if num_tokens:
        _norm_kernel[(num_tokens, num_heads)](
            mixed, gates, norm.weight, result, gates.stride(0), result.stride(0), norm.eps,
            ROUNDS_FIRST=norm.is_rounded_first, VALUE_DIM=value_dim, BLOCK=triton.next_power_of_2(value_dim),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return result


def _operands(weights: DeltaWeights, rows: DeltaRows) -> tuple[Tensor, ...]:
    return rows.channels, rows.betas, rows.decays, weights.rates, weights.biases


def _strides(rows: DeltaRows, states: Tensor) -> tuple[int, ...]:
    of_rows = rows.channels.stride(0), rows.betas.stride(0), rows.decays.stride(0)
    return *of_rows, states.stride(0), states.stride(1)


def _sizes(heads: DeltaHeads, states: Tensor) -> dict[str, int]:
    return {
        "HEADS_PER_PART": states.shape[2],
        "VALUES_PER_KEY": heads.values_per_key,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "NUM_HEADS": heads.num_value_heads,
        "KEYS": max(16, triton.next_power_of_2(heads.key_dim)),
        "COLUMNS": _COLUMNS,
        "EPS": LENGTH_EPS,
    }


@triton.jit
def _unit(x, EPS: tl.constexpr):
    """Scale rows of x [rows, KEYS] to unit length."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def _logs_and_betas(betas, decays, rates, biases, tokens, is_there, head, beta_stride, decay_stride):
    """Return the logarithms of the decays of some tokens of a head, and their betas; zeros for those that are
    not there."""
    x = tl.load(decays + tokens * decay_stride + head, mask=is_there, other=0.0).to(tl.float32)
    x += tl.load(biases + head)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    logs = tl.where(is_there, -tl.load(rates + head) * softplus, 0.0)
    beta = tl.load(betas + tokens * beta_stride + head, mask=is_there, other=0.0)
    beta = tl.sigmoid(beta.to(tl.float32)).to(beta.dtype).to(tl.float32)
    return logs, tl.where(is_there, beta, 0.0)


@triton.jit
def _state_of(
    states, block, head, block_stride, part_stride,
    HEADS_PER_PART: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return where the state of a head is in a block."""
    place = (head % HEADS_PER_PART) * KEY_DIM * VALUE_DIM
    return states + block.to(tl.int64) * block_stride + (head // HEADS_PER_PART) * part_stride + place


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_INDICES)
def _token_kernel(
    channels, betas, decays, rates, biases, states, reads, writes, firsts, lengths, mixed,
    channel_stride, beta_stride, decay_stride, block_stride, part_stride, scale,
    HAS_LENGTHS: tl.constexpr, HEADS_PER_PART: tl.constexpr, VALUES_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, value heads, tiles of columns)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first, length = sequence, 1
    if HAS_LENGTHS:
        first, length = tl.load(firsts + sequence), tl.load(lengths + sequence)
    dims = tl.arange(0, KEYS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    is_state = is_dim[:, None] & is_column[None, :]
    at = dims[:, None] * VALUE_DIM + columns[None, :]
    read = tl.load(reads + sequence)
    before = _state_of(
        states, tl.maximum(read, 0), head, block_stride, part_stride, HEADS_PER_PART, KEY_DIM, VALUE_DIM
    )
    state = tl.load(before + at, mask=is_state & (read >= 0), other=0.0)
    width: tl.constexpr = 2 * KEY_DIM + VALUES_PER_KEY * VALUE_DIM
    for i in range(0, length):
        token = (first + i).to(tl.int64)
        row = channels + token * channel_stride + (head // VALUES_PER_KEY) * width
        query = tl.load(row + dims, mask=is_dim, other=0.0).to(tl.float32)
        key = tl.load(row + KEY_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
        query = query * (tl.rsqrt(tl.sum(query * query, 0) + EPS) * scale)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + EPS)
        own = row + 2 * KEY_DIM + (head % VALUES_PER_KEY) * VALUE_DIM
        value = tl.load(own + columns, mask=is_column, other=0.0).to(tl.float32)
        log, beta = _logs_and_betas(
            betas, decays, rates, biases, token, token >= 0, head, beta_stride, decay_stride
        )
        state = state * tl.exp(log)
        change = (value - tl.sum(state * key[:, None], 0)) * beta
        state = state + key[:, None] * change[None, :]
        to = mixed + (token * NUM_HEADS + head) * VALUE_DIM + columns
        tl.store(to, tl.sum(state * query[:, None], 0), mask=is_column)
    block = tl.load(writes + sequence)
    after = _state_of(states, block, head, block_stride, part_stride, HEADS_PER_PART, KEY_DIM, VALUE_DIM)
    tl.store(after + at, state, mask=is_state)


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_INDICES)
def _inverse_kernel(
    channels, betas, decays, rates, biases, chunk_tokens, chunk_lengths, inverses,
    channel_stride, beta_stride, decay_stride,
    HEADS_PER_PART: tl.constexpr, VALUES_PER_KEY: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    EPS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Invert the triangular system of a chunk, row by row. Grid: (chunks, value heads)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    places, dims = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    is_there = places < tl.load(chunk_lengths + chunk)
    tokens = (tl.load(chunk_tokens + chunk) + places).to(tl.int64)
    width: tl.constexpr = 2 * KEY_DIM + VALUES_PER_KEY * VALUE_DIM
    at = channels + tokens[:, None] * channel_stride + (head // VALUES_PER_KEY) * width + KEY_DIM + dims
    keys = tl.load(at, mask=is_there[:, None] & (dims < KEY_DIM)[None, :], other=0.0).to(tl.float32)
    keys = _unit(keys, EPS)
    logs, beta = _logs_and_betas(
        betas, decays, rates, biases, tokens, is_there, head, beta_stride, decay_stride
    )
    sums = tl.cumsum(logs, 0)
    is_before = places[:, None] > places[None, :]
    between = tl.where(is_before, tl.exp(tl.where(is_before, sums[:, None] - sums[None, :], 0.0)), 0.0)
    products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    system = beta[:, None] * products * between
    inverse = (places[:, None] == places[None, :]).to(tl.float32)
    for i in range(1, CHUNK):
        row = tl.sum(tl.where((places == i)[:, None], system, 0.0), 0)
        solved = tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where((places == i)[:, None], inverse - solved[None, :], inverse)
    to = inverses + (chunk.to(tl.int64) * NUM_HEADS + head) * CHUNK * CHUNK
    tl.store(to + places[:, None] * CHUNK + places[None, :], inverse)


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_INDICES)
def _chunk_kernel(
    channels, betas, decays, rates, biases, states, reads, writes, firsts, lengths, first_chunks, inverses,
    mixed, channel_stride, beta_stride, decay_stride, block_stride, part_stride, scale,
    HEADS_PER_PART: tl.constexpr, VALUES_PER_KEY: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    EPS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, value heads, tiles of columns)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(firsts + sequence), tl.load(lengths + sequence)
    places, dims = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    is_state = is_dim[:, None] & is_column[None, :]
    at = dims[:, None] * VALUE_DIM + columns[None, :]
    read = tl.load(reads + sequence)
    before = _state_of(
        states, tl.maximum(read, 0), head, block_stride, part_stride, HEADS_PER_PART, KEY_DIM, VALUE_DIM
    )
    state = tl.load(before + at, mask=is_state & (read >= 0), other=0.0)
    width: tl.constexpr = 2 * KEY_DIM + VALUES_PER_KEY * VALUE_DIM
    system = inverses + (tl.load(first_chunks + sequence).to(tl.int64) * NUM_HEADS + head) * CHUNK * CHUNK
    is_seen = places[:, None] >= places[None, :]
    for start in range(0, length, CHUNK):
        is_there = start + places < length
        tokens = (first + start + places).to(tl.int64)
        rows = channels + tokens[:, None] * channel_stride + (head // VALUES_PER_KEY) * width
        is_key = is_there[:, None] & is_dim[None, :]
        is_value = is_there[:, None] & is_column[None, :]
        logs, beta = _logs_and_betas(
            betas, decays, rates, biases, tokens, is_there, head, beta_stride, decay_stride
        )
        sums = tl.cumsum(logs, 0)
        # The last of these sums: one in another order would be rounded otherwise, and not end at zero.
        total = tl.sum(tl.where(places == CHUNK - 1, sums, 0.0), 0)
        since_start = tl.exp(sums)[:, None]
        keys = _unit(tl.load(rows + KEY_DIM + dims, mask=is_key, other=0.0).to(tl.float32), EPS)
        queries = _unit(tl.load(rows + dims, mask=is_key, other=0.0).to(tl.float32), EPS) * scale
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores *= tl.where(is_seen, tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], 0.0)), 0.0)
        out = since_start * tl.dot(queries, state, input_precision=PRECISION)
        known = tl.dot(keys, state, input_precision=PRECISION)
        own = rows + 2 * KEY_DIM + (head % VALUES_PER_KEY) * VALUE_DIM
        values = tl.load(own + columns, mask=is_value, other=0.0).to(tl.float32)
        wanted = beta[:, None] * (values - since_start * known)
        inverse = tl.load(system + places[:, None] * CHUNK + places[None, :])
        changes = tl.dot(inverse, wanted, input_precision=PRECISION)
        out += tl.dot(scores, changes, input_precision=PRECISION)
        to = mixed + (tokens[:, None] * NUM_HEADS + head) * VALUE_DIM + columns[None, :]
        tl.store(to, out, mask=is_value)
        # Read again: meanwhile there are too few registers for them.
        keys = _unit(tl.load(rows + KEY_DIM + dims, mask=is_key, other=0.0).to(tl.float32), EPS)
        until_end = keys * tl.exp(total - sums)[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(until_end), changes, input_precision=PRECISION)
        system += NUM_HEADS * CHUNK * CHUNK
    block = tl.load(writes + sequence)
    after = _state_of(states, block, head, block_stride, part_stride, HEADS_PER_PART, KEY_DIM, VALUE_DIM)
    tl.store(after + at, state, mask=is_state)


@triton.jit(do_not_specialize=["gate_stride", "out_stride"])
def _norm_kernel(
    mixed, gates, weight, out, gate_stride, out_stride, eps,
    ROUNDS_FIRST: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, value heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    is_column = columns < VALUE_DIM
    at = (token * tl.num_programs(1) + head) * VALUE_DIM + columns
    dtype = out.dtype.element_ty
    x = tl.load(mixed + at, mask=is_column, other=0.0).to(dtype).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / VALUE_DIM + eps)
    if ROUNDS_FIRST:
        x = x.to(dtype).to(tl.float32)
    x = (x * tl.load(weight + columns, mask=is_column, other=0.0)).to(dtype).to(tl.float32)
    gate = tl.load(gates + token * gate_stride + head * VALUE_DIM + columns, mask=is_column, other=0.0)
    gate = gate.to(tl.float32)
    result = (x * gate * tl.sigmoid(gate)).to(dtype)
    tl.store(out + token * out_stride + head * VALUE_DIM + columns, result, mask=is_column)
