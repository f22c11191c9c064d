"""Steps of the gated delta rule, and what transformers computes for them."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from workers.model.norm import Norm
from workers.model.state.delta_rule import DeltaRows, DeltaWeights
from workers.model.state.delta_shape import DeltaHeads
from workers.model.state.state_step import NO_STATE, StateStep

NUM_BLOCKS = 24


@dataclasses.dataclass
class DeltaCase:
    """Inputs of some sequences, which lie one after another, with the weights of a layer and its states."""

    heads: DeltaHeads
    weights: DeltaWeights
    rows: DeltaRows
    states: Tensor
    step: StateStep

    @staticmethod
    def draw(
        heads: DeltaHeads,
        lengths: list[int],
        *,
        is_started: bool = True,
        num_parts: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        seed: int = 0,
    ) -> DeltaCase:
        """Draw sequences of these new tokens, which continue a state if they are started. All blocks have
        states that are not zero."""
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device)

        num_tokens, num_values = sum(lengths), heads.num_value_heads
        weights = DeltaWeights(
            normal(num_values).exp(), normal(num_values), Norm(1 + normal(heads.value_dim) / 8, 1e-6)
        )
        rows = DeltaRows(
            normal(num_tokens, heads.num_channels).to(dtype),
            normal(num_tokens, num_values * heads.value_dim).to(dtype),
            normal(num_tokens, num_values).to(dtype),
            normal(num_tokens, num_values).to(dtype),
        )
        # Each block has another layer's state, and part of a convolution's, beside these.
        shape = (NUM_BLOCKS, num_parts, 2 * num_values // num_parts + 1, heads.key_dim, heads.value_dim)
        states = normal(*shape)[:, :, -(num_values // num_parts) :]
        blocks = torch.randperm(NUM_BLOCKS, generator=draw).to(torch.int32).numpy()
        reads = blocks[: len(lengths)] if is_started else np.full(len(lengths), NO_STATE, np.int32)
        # Every second sequence continues its state in place.
        others = blocks[len(lengths) : 2 * len(lengths)]
        writes = np.where((np.arange(len(lengths)) % 2 == 0) & is_started, reads, others)
        return DeltaCase(heads, weights, rows, states, StateStep(reads, writes, np.array(lengths, np.int32)))

    def rows_of(self, start: int, end: int) -> DeltaRows:
        return DeltaRows(*(it[start:end] for it in self.rows))

    def states_in(self, blocks: np.ndarray) -> Tensor:
        """Return the states in some blocks, [num_blocks, num_value_heads, key_dim, value_dim]."""
        return self.states[torch.from_numpy(blocks).long().to(self.states.device)].flatten(1, 2)

    def expected(self, *, is_chunked: bool = False) -> tuple[Tensor, Tensor]:
        """Return the outputs [num_tokens, num_value_heads * value_dim] and the states behind each sequence
        [num_sequences, num_value_heads, key_dim, value_dim] that transformers computes."""
        norm = reference.Qwen3NextRMSNormGated(self.heads.value_dim, self.weights.norm.eps)
        norm.weight.data = self.weights.norm.weight.cpu().to(self.rows.gates.dtype)
        outputs, states, start = [], [], 0
        for sequence, length in enumerate(self.step.lengths.tolist()):
            rows = DeltaRows(*(it.cpu() for it in self.rows_of(start, start + length)))
            mixed, state = self._run(rows, self._before(sequence), is_chunked)
            gates = rows.gates.unflatten(1, (-1, self.heads.value_dim))
            outputs.append(norm(mixed[0], gates).flatten(1).detach())
            states.append(state)
            start += length
        return torch.cat(outputs), torch.cat(states)

    def _before(self, sequence: int) -> Tensor | None:
        read = int(self.step.reads[sequence])
        return None if read == NO_STATE else self.states[read].flatten(0, 1).cpu().unsqueeze(0)

    def _run(self, rows: DeltaRows, before: Tensor | None, is_chunked: bool) -> tuple[Tensor, Tensor]:
        """Return the outputs [1, num_tokens, num_value_heads, value_dim] of a sequence, and its state."""
        heads, weights = self.heads, self.weights
        channels = rows.channels.unflatten(1, (heads.num_key_heads, heads.channels_per_key))
        queries, keys, values = channels.split(
            (heads.key_dim, heads.key_dim, heads.values_per_key * heads.value_dim), dim=2
        )
        run = (
            reference.torch_chunk_gated_delta_rule
            if is_chunked
            else reference.torch_recurrent_gated_delta_rule
        )
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
