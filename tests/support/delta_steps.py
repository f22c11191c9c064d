"""Steps of the gated delta rule."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

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
