"""Rotary embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.attention.interface import Rotation


def rope_table(positions: Tensor, rotation: Rotation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines for `rotate`, each [num_tokens, 1, head_dim]."""
    cos, sin = (table.to(dtype) for table in rotation.table(positions))
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (d, d + head_dim / 2) of x [num_tokens, num_heads, head_dim] into a new tensor."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
