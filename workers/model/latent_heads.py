"""The heads of latent attention: how queries become queries of latents, and latents keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.head_products import HeadProducts, make_head_products
from workers.model.latent_shape import LatentShape


class LatentHeads:
    """The products of a layer's heads with latents, by the rows of their expansion, `rows` [num_heads *
    expanded_dim, kv_lora_rank], of which each head has those of its key before those of its value.

    Where weights are packed, the rows of keys are kept twice: by columns for queries of latents, and by rows
    for keys. By torch all products are of views of `rows`."""

    def __init__(self, rows: Tensor, shape: LatentShape, *, is_deterministic: bool = False) -> None:
        by_head = rows.view(-1, shape.expanded_dim, shape.kv_lora_rank)
        keys, values = torch.split(by_head, [shape.qk_nope_head_dim, shape.v_head_dim], 1)
        self.num_heads = len(by_head)

        def products(weights: Tensor) -> HeadProducts:
            return make_head_products(weights, is_deterministic=is_deterministic)

        self._absorbed, self._keys = products(keys.transpose(1, 2)), products(keys)
        self._values = products(values)

    def absorb(self, queries: Tensor, out: Tensor) -> None:
        """Map the part of queries that is not rotated, [num_tokens, num_heads, qk_nope_head_dim], to queries
        of latents [num_tokens, num_heads, kv_lora_rank]."""
        self._absorbed(queries, out)

    def values(self, latents: Tensor, out: Tensor) -> None:
        """Map latents, mixed for each head, [num_tokens, num_heads, kv_lora_rank], to mixed values
        [num_tokens, num_heads, v_head_dim]."""
        self._values(latents, out)

    def expand(self, latents: Tensor, keys: Tensor, values: Tensor, first_head: int) -> None:
        """Map `latents` [num_tokens, kv_lora_rank] to the part of `keys` that is not rotated, [num_tokens,
        num_expanded, qk_nope_head_dim], and to `values` [num_tokens, num_expanded, v_head_dim], of the heads
        from `first_head` on."""
        shared = latents[:, None].expand(-1, keys.shape[1], -1)
        self._keys(shared, keys, first_head)
        self._values(shared, values, first_head)
