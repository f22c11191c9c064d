"""Normalize values as Gemma 4 does."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class ValueNorm:
    """An RMS norm without weights of each head of values, which may be the keys as they were projected."""

    def __init__(self, num_kv_heads: int, head_dim: int, eps: float, *, are_keys: bool) -> None:
        self._num_kv_heads, self._head_dim, self._eps = num_kv_heads, head_dim, eps
        self._are_keys = are_keys
        # The columns of values that no product computes.
        self.num_added = num_kv_heads * head_dim if are_keys else 0

    def normalize(self, qkv: Tensor) -> None:
        """Write the normed values to the last columns of `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) *
        head_dim]."""
        size = self._num_kv_heads * self._head_dim
        values = qkv[:, -size:]
        source = qkv[:, -2 * size : -size] if self._are_keys else values
        heads = source.reshape(-1, self._num_kv_heads, self._head_dim)
        normed = F.rms_norm(heads.float(), (self._head_dim,), None, self._eps)
        values.copy_(normed.flatten(1))
