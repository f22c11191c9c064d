"""Normalize each head of queries and keys by weights of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.norm import Norm


class HeadNorms:
    """LayerNorms without bias of the heads that a rank holds: the weights of `queries` [num_heads, head_dim]
    and of `keys` [num_kv_heads, head_dim]. A head's norm needs no other head, and so no other rank."""

    def __init__(self, queries: Norm, keys: Norm) -> None:
        self._weight = torch.cat((queries.weight, keys.weight))
        self._eps = queries.eps

    def normalize(self, qkv: Tensor) -> None:
        """Normalize queries and keys of `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], in
        place."""
        num_heads, head_dim = self._weight.shape
        heads = qkv[:, : num_heads * head_dim].view(len(qkv), num_heads, head_dim)
        heads.copy_(F.layer_norm(heads.float(), (head_dim,), None, None, self._eps) * self._weight)
