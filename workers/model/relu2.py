"""Compute the activation of feed-forwards without a gate that squares what is positive."""

from __future__ import annotations

import torch
from torch import Tensor


def relu2(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the squares of the positive values of x, 0 for others; `out` may be x."""
    positive = x.clamp(min=0)
    return torch.mul(positive, positive, out=out)
