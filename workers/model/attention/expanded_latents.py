"""The attention of several new tokens of one sequence to keys and values that are expanded from its latents,
some heads at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.attention.interface import (
    AttentionBackend,
    LayerAttention,
    Marks,
    SequenceSpan,
    StepInput,
    kv_shape,
)
from workers.model.latent_heads import LatentHeads
from workers.model.latent_shape import LatentShape

_ALL_LAYERS = LayerAttention(0, 0)


class ExpandedChunk:
    """The `num_tokens` new tokens of a sequence from position `start` on, whose queries are rows of a step
    from `first_row` on. `expanded` is a backend over the memory of as many heads as are expanded at a
    time."""

    def __init__(
        self,
        latent: LatentShape,
        expanded: AttentionBackend,
        start: int,
        num_tokens: int,
        first_row: int,
        marks: Marks,
    ) -> None:
        self._latent = latent
        self.num_context = start + num_tokens
        self._rows = slice(first_row, first_row + num_tokens)
        self._expanded = expanded.kv[0, 0].transpose(1, 2)[:, : self.num_context]
        span = SequenceSpan(start, num_tokens, (0,))
        capacity = kv_shape(expanded.kv).block_tokens
        self._plan = expanded.plan(StepInput.of([span], capacity, marks=marks))

    def attend(self, heads: LatentHeads, latents: Tensor, queries: Tensor, mixed: Tensor) -> None:
        """Attend from the chunk's `queries` [num_tokens, num_heads * head_dim], of the whole step, to
        `latents` [num_context, width] into the step's `mixed` [num_tokens, num_heads, v_head_dim]."""
        latent = self._latent
        normed, shared = torch.split(latents, [latent.kv_lora_rank, latent.qk_rope_head_dim], 1)
        keys, values = self._expanded
        num_expanded, head_dim = keys.shape[1:]
        for first in range(0, heads.num_heads, num_expanded):
            unrotated, rotated = torch.split(keys, [latent.qk_nope_head_dim, latent.qk_rope_head_dim], 2)
            heads.expand(normed, unrotated, values[..., : latent.v_head_dim], first)
            rotated.copy_(shared[:, None].expand_as(rotated))
            values[..., latent.v_head_dim :] = 0
            of_heads = queries[self._rows, first * head_dim : (first + num_expanded) * head_dim]
            attended = self._plan.attend(_ALL_LAYERS, of_heads).view(-1, num_expanded, head_dim)
            mixed[self._rows, first : first + num_expanded] = attended[..., : latent.v_head_dim]
