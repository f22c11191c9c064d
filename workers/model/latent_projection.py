"""Compute what attention takes in a layer of latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.apply_norm import apply_norm
from workers.model.latent_shape import LatentShape
from workers.model.latent_weights import LatentWeights
from workers.model.linear_weights import LinearWeights
from workers.model.make_linear import make_linear
from workers.model.products import Linear, Workspace


class LatentProjection:
    """Maps hidden states [num_tokens, hidden_size] to [num_tokens, num_heads * head_dim + width]: the queries
    of each head, whose last `qk_rope_head_dim` dimensions are to be rotated, and what the KV has for a token,
    of which as many are."""

    def __init__(
        self,
        weights: LatentWeights,
        shape: LatentShape,
        workspace: Workspace,
        *,
        is_deterministic: bool = False,
    ) -> None:
        def linear(part: LinearWeights) -> Linear:
            return make_linear(part.parts, part.bias, is_deterministic=is_deterministic)

        self._shape, self._workspace = shape, workspace
        self._latents, self._queries = linear(weights.latents), linear(weights.queries)
        self._q_norm, self._kv_norm = weights.q_norm, weights.kv_norm
        self.num_outputs = self._queries.num_outputs + shape.width

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute them for x [num_tokens, hidden_size] into `out`, which is contiguous."""
        shape, take = self._shape, self._workspace.take
        latents = self._latents(x, take("latents", x, shape.num_latents))
        sizes = [shape.q_lora_rank, shape.kv_lora_rank, shape.qk_rope_head_dim]
        of_queries, of_kv, shared = torch.split(latents, sizes, 1)
        inputs = x
        if self._q_norm is not None:
            inputs = apply_norm(of_queries, self._q_norm, take("q_latents", x, shape.q_lora_rank))
        queries, normed, rotated = torch.split(out, [self._queries.num_outputs, *sizes[1:]], 1)
        self._queries(inputs, queries)
        apply_norm(of_kv, self._kv_norm, normed)
        rotated.copy_(shared)
        return out
