"""Choose the attention backend of a rank."""

from __future__ import annotations

from torch import Tensor

from workers.model.attention.interface import AttentionBackend, AttentionShape
from workers.model.attention.torch_backend import TorchAttention


def choose_attention(shape: AttentionShape, kv: Tensor) -> AttentionBackend:
    """Return the backend for a rank's KV."""
    return TorchAttention(shape, kv)
