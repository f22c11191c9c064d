"""Normalize all queries, and all keys, of a token together."""

from __future__ import annotations

from torch import Tensor

from workers.model.apply_norm import apply_norm
from workers.model.norm import Norm


class RowNorms:
    """The norms of the queries [num_heads * head_dim] and keys [num_kv_heads * head_dim] of a token.
    `workers.model.parallel` replaces it by one that joins the heads of several ranks."""

    def __init__(self, queries: Norm, keys: Norm) -> None:
        self.queries, self.keys = queries, keys

    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys of `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]."""
        num_queries, num_keys = len(self.queries.weight), len(self.keys.weight)
        return qkv[:, :num_queries], qkv[:, num_queries : num_queries + num_keys]

    def normalize(self, qkv: Tensor) -> None:
        """Normalize queries and keys of `qkv`, in place."""
        for part, norm in zip(self.parts(qkv), (self.queries, self.keys), strict=True):
            apply_norm(part, norm, part)
