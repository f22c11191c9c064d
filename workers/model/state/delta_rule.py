"""The gated delta rule in plain torch: token by token, and in chunks.

Each value head has a state S [key_dim, value_dim]. A token with the query q, the key k and the value v, both
q and k of unit length, decays the state by exp(g), and moves the value that the state has for its key a part
beta of the way towards v:

    S = exp(g) * S
    S = S + k (beta * (v - k S))
    o = q S / sqrt(key_dim)

In chunks, the changes of all tokens of a chunk are the solution of a triangular system, and what is left are
products with the state before the chunk. The two forms differ in rounding. States and everything between
inputs and output are float32.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.norm import Norm
from workers.model.state.delta_shape import DeltaHeads
from workers.model.state.state_step import NO_STATE, StateStep

CHUNK_TOKENS = 64
# What is added to the square of a query's or key's length.
LENGTH_EPS = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a layer's value heads: the decays' `rates`, which are positive, and their `biases`,
    float32 [num_value_heads], and the norm of each head's output, of value_dim."""

    rates: Tensor
    biases: Tensor
    norm: Norm


class DeltaRows(NamedTuple):
    """The tokens of a step. `channels` [num_tokens, num_channels] are those of `DeltaHeads`, behind the
    convolution; `gates` [num_tokens, num_value_heads * value_dim], `betas` and `decays` [num_tokens,
    num_value_heads] are products as they come. Tensors are contiguous in their last dimension."""

    channels: Tensor
    gates: Tensor
    betas: Tensor
    decays: Tensor


class _Tokens(NamedTuple):
    """What tokens bring to their value heads, float32: queries and keys [..., num_value_heads, key_dim],
    values [..., num_value_heads, value_dim], betas and logarithms of decays [..., num_value_heads]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    betas: Tensor
    decays: Tensor

    def at(self, rows: slice | Tensor) -> _Tokens:
        return _Tokens(*(it[rows] for it in self))


def gated_norm(mixed: Tensor, gates: Tensor, norm: Norm) -> Tensor:
    """Normalize each head of `mixed` [num_tokens, num_heads, value_dim], and multiply it by the SiLU of
    `gates` [num_tokens, num_heads * value_dim], of whose dtype the result is, [num_tokens, num_heads *
    value_dim]."""
    normed = norm.normed(mixed.to(gates.dtype)).flatten(1)
    return (normed.float() * F.silu(gates.float())).to(gates.dtype)


def run_delta_rule(
    heads: DeltaHeads,
    weights: DeltaWeights,
    rows: DeltaRows,
    states: Tensor,
    step: StateStep,
    *,
    is_deterministic: bool = False,
) -> Tensor:
    """Return the outputs of a step's tokens [num_tokens, num_value_heads * value_dim], gated and normalized,
    and continue the states of its sequences.

    `states` float32 [num_blocks, num_parts, heads_per_part, key_dim, value_dim] are those of the layer in all
    blocks, value heads in their order. `is_deterministic`: each token is computed as if it came alone."""
    tokens = _tokens(heads, weights, rows)
    if step.is_decode:
        mixed = _step_once(tokens, states, *step.on(states.device))
    else:
        mixed = _run_sequences(tokens, states, step, is_deterministic=is_deterministic)
    return gated_norm(mixed, rows.gates, weights.norm)


def _tokens(heads: DeltaHeads, weights: DeltaWeights, rows: DeltaRows) -> _Tokens:
    key_dim, num_values = heads.key_dim, heads.values_per_key
    channels = rows.channels.view(-1, heads.num_key_heads, heads.channels_per_key).float()
    queries, keys, values = torch.split(channels, [key_dim, key_dim, num_values * heads.value_dim], dim=2)
    decays = -weights.rates * F.softplus(rows.decays.float() + weights.biases)
    return _Tokens(
        _unit(queries).mul(key_dim**-0.5).repeat_interleave(num_values, dim=1),
        _unit(keys).repeat_interleave(num_values, dim=1),
        values.reshape(len(values), heads.num_value_heads, heads.value_dim),
        rows.betas.sigmoid().float(),
        decays,
    )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


def _run_sequences(tokens: _Tokens, states: Tensor, step: StateStep, *, is_deterministic: bool) -> Tensor:
    """Compute outputs [num_tokens, num_value_heads, value_dim]: those of sequences with one token at once,
    and the others one by one."""
    mixed = torch.empty_like(tokens.values)
    ends = step.lengths.cumsum()
    single = torch.from_numpy((step.lengths == 1).nonzero()[0])
    if len(single):
        at = single.to(states.device)
        rows, reads, writes = (
            torch.from_numpy(it).to(states.device).long()[at] for it in (ends - 1, step.reads, step.writes)
        )
        mixed[rows] = _step_once(tokens.at(rows), states, reads, writes)
    for sequence in (step.lengths > 1).nonzero()[0]:
        end, read = int(ends[sequence]), int(step.reads[sequence])
        span = slice(end - int(step.lengths[sequence]), end)
        before = states[read].flatten(0, 1) if read != NO_STATE else torch.zeros_like(states[0]).flatten(0, 1)
        run = _recur if is_deterministic else _run_chunks
        mixed[span], after = run(tokens.at(span), before)
        states[int(step.writes[sequence])] = after.view_as(states[0])
    return mixed


def _step_once(tokens: _Tokens, states: Tensor, reads: Tensor, writes: Tensor) -> Tensor:
    """Continue one state for each token, in blocks `reads` and `writes`, int64 [num_tokens]."""
    before = states[reads.clamp(min=0)].flatten(1, 2)
    before = torch.where((reads == NO_STATE)[:, None, None, None], 0.0, before)
    mixed, after = _advance(tokens, before)
    states[writes] = after.view(len(writes), *states.shape[1:])
    return mixed


def _advance(tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of tokens that each continue a state, and the states behind them."""
    state = state * tokens.decays.exp()[..., None, None]
    keys = tokens.keys.unsqueeze(-1)
    changes = (tokens.values - (state * keys).sum(-2)) * tokens.betas.unsqueeze(-1)
    state = state + keys * changes.unsqueeze(-2)
    return (state * tokens.queries.unsqueeze(-1)).sum(-2), state


def _recur(tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the tokens of a sequence one by one; return outputs, and the state behind the last."""
    mixed = torch.empty_like(tokens.values)
    for place in range(len(mixed)):
        mixed[place : place + 1], after = _advance(tokens.at(slice(place, place + 1)), state.unsqueeze(0))
        state = after[0]
    return mixed, state


def _run_chunks(tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same in chunks, up to rounding."""
    mixed = []
    for start in range(0, len(tokens.values), CHUNK_TOKENS):
        out, state = _run_chunk(tokens.at(slice(start, start + CHUNK_TOKENS)), state)
        mixed.append(out)
    return torch.cat(mixed), state


def _run_chunk(tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one chunk. With D[i, j] the decay between tokens j and i, the changes u of its tokens solve
    u[i] + beta[i] * sum(D[i, j] * (k[i] . k[j]) * u[j] for j < i) = beta[i] * (v[i] - D[i] * k[i] S)."""
    queries, keys, values = (it.transpose(0, 1) for it in tokens[:3])
    betas, logs = tokens.betas.t().unsqueeze(-1), tokens.decays.t().cumsum(1)
    between = (logs.unsqueeze(2) - logs.unsqueeze(1)).tril().exp().tril()
    since_start = logs.exp().unsqueeze(-1)
    system = (betas * (keys @ keys.mT) * between).tril(-1)
    wanted = betas * (values - since_start * (keys @ state))
    changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    mixed = since_start * (queries @ state) + ((queries @ keys.mT) * between) @ changes
    until_end = (logs[:, -1:] - logs).exp().unsqueeze(-1)
    state = state * since_start[:, -1:] + (keys * until_end).mT @ changes
    return mixed.transpose(0, 1), state
