"""Compute steps of the gated delta rule by transformers."""

from __future__ import annotations

import torch
from delta_steps import DeltaCase
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from workers.model.state.delta_rule import DeltaRows
from workers.model.state.state_step import NO_STATE


def expected_of(case: DeltaCase, *, is_chunked: bool = False) -> tuple[Tensor, Tensor]:
    """Return the outputs [num_tokens, num_value_heads * value_dim] and the states behind each sequence
    [num_sequences, num_value_heads, key_dim, value_dim] that transformers computes."""
    norm = reference.Qwen3NextRMSNormGated(case.heads.value_dim, case.weights.norm.eps)
    norm.weight.data = case.weights.norm.weight.cpu().to(case.rows.gates.dtype)
    outputs, states, start = [], [], 0
    for sequence, length in enumerate(case.step.lengths.tolist()):
        rows = DeltaRows(*(it.cpu() for it in case.rows_of(start, start + length)))
        mixed, state = _run(case, rows, _before(case, sequence), is_chunked)
        gates = rows.gates.view(length, -1, case.heads.value_dim)
        outputs.append(norm(mixed[0], gates).flatten(1).detach())
        states.append(state)
        start += length
    return torch.cat(outputs), torch.cat(states)


def _before(case: DeltaCase, sequence: int) -> Tensor | None:
    read = int(case.step.reads[sequence])
    return None if read == NO_STATE else case.states[read].flatten(0, 1).cpu().unsqueeze(0)


def _run(case: DeltaCase, rows: DeltaRows, before: Tensor | None, is_chunked: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs [1, num_tokens, num_value_heads, value_dim] of a sequence, and its state."""
    heads, weights = case.heads, case.weights
    channels = rows.channels.view(-1, heads.num_key_heads, heads.channels_per_key)
    queries, keys, values = torch.split(
        channels,
        [heads.key_dim, heads.key_dim, heads.values_per_key * heads.value_dim],
        dim=2,
    )
    run = reference.torch_chunk_gated_delta_rule if is_chunked else reference.torch_recurrent_gated_delta_rule
    decays = torch.nn.functional.softplus(rows.decays.float() + weights.biases.cpu())
    mixed, state = run(
        queries.unsqueeze(0),
        keys.unsqueeze(0),
        values.reshape(1, len(values), heads.num_value_heads, heads.value_dim),
        g=(-weights.rates.cpu() * decays).unsqueeze(0),
        beta=rows.betas.sigmoid().unsqueeze(0),
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return mixed, state
