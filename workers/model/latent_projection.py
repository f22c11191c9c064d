"""Compute queries, keys and values of latent attention, expanded to heads, and the product of what attention
mixes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.apply_norm import apply_norm
from workers.model.latent_shape import LatentShape
from workers.model.latent_weights import LatentWeights
from workers.model.layer_products import AddedProduct
from workers.model.linear_weights import LinearWeights
from workers.model.products import Linear, Workspace, make_linear


class LatentProjection:
    """Maps hidden states [num_tokens, hidden_size] to queries, keys and values [num_tokens, 3 * num_heads *
    head_dim], with keys and values of each head and values padded with zeros: the KV is that of any other
    model whose heads of queries all have keys of their own."""

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
        self._expansion = linear(weights.expansion)
        self._q_norm, self._kv_norm = weights.q_norm, weights.kv_norm
        self._num_heads = self._expansion.num_outputs // shape.expanded_dim
        self.num_outputs = 3 * self._num_heads * shape.head_dim

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute them for x [num_tokens, hidden_size] into `out`, which is contiguous."""
        shape, take = self._shape, self._workspace.take
        latents = self._latents(x, take("latents", x, shape.num_latents))
        sizes = [shape.q_lora_rank, shape.kv_lora_rank, shape.qk_rope_head_dim]
        of_queries, of_kv, shared = torch.split(latents, sizes, 1)
        inputs = x
        if self._q_norm is not None:
            inputs = apply_norm(of_queries, self._q_norm, take("q_latents", x, shape.q_lora_rank))
        self._queries(inputs, out[:, : self._queries.num_outputs])
        normed = apply_norm(of_kv, self._kv_norm, take("kv_latents", x, shape.kv_lora_rank))
        expanded = self._expansion(normed, take("expanded", x, self._expansion.num_outputs))
        self._fill(out, expanded, shared)
        return out

    def _fill(self, out: Tensor, expanded: Tensor, shared: Tensor) -> None:
        """Write keys and values behind the queries: of `expanded` [num_tokens, num_heads * expanded_dim], and
        in each key the part `shared` [num_tokens, qk_rope_head_dim]. The halves of a key begin with the
        halves of this part, as pairs that are rotated together lie half a head apart."""
        shape, num_tokens, num_heads = self._shape, len(out), self._num_heads
        num_columns, num_pairs = num_heads * shape.head_dim, shape.qk_rope_head_dim // 2
        by_head = expanded.view(num_tokens, num_heads, shape.expanded_dim)
        unrotated, unpadded = torch.split(by_head, [shape.qk_nope_head_dim, shape.v_head_dim], 2)
        keys = out[:, num_columns : 2 * num_columns].view(num_tokens, num_heads, 2, shape.head_dim // 2)
        keys[..., :num_pairs] = shared.view(num_tokens, 1, 2, num_pairs)
        keys[..., num_pairs:] = unrotated.view(num_tokens, num_heads, 2, shape.qk_nope_head_dim // 2)
        values = out[:, 2 * num_columns :].view(num_tokens, num_heads, shape.head_dim)
        values[..., : shape.v_head_dim] = unpadded
        values[..., shape.v_head_dim :] = 0


def without_padding(product: Linear, shape: LatentShape, workspace: Workspace) -> AddedProduct:
    """Return the product of what attention mixes of padded values, [num_tokens, num_heads * head_dim], where
    `product` is that of values without padding."""
    return product if shape.v_head_dim == shape.head_dim else _UnpaddedProduct(product, shape, workspace)


class _UnpaddedProduct:
    """Leaves the padding out before a product."""

    def __init__(self, product: Linear, shape: LatentShape, workspace: Workspace) -> None:
        self._product, self._shape, self._workspace = product, shape, workspace

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(self._unpadded(x))

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        return self._product.add_to(hidden, self._unpadded(x))

    def _unpadded(self, mixed: Tensor) -> Tensor:
        num_columns, dim = self._product.num_inputs, self._shape.v_head_dim
        by_head = mixed.view(len(mixed), num_columns // dim, self._shape.head_dim)
        out = self._workspace.take("unpadded", mixed, num_columns)
        out.view(len(mixed), num_columns // dim, dim).copy_(by_head[..., :dim])
        return out
