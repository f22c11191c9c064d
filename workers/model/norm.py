"""Describe an RMS norm, and compute it in plain torch."""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: float32 `weight` [size], by which values that have unit mean square are multiplied. Most
    families round the values to the model's dtype before (`is_rounded_first`), some only the product."""

    weight: Tensor
    eps: float
    is_rounded_first: bool = True

    def normed(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x [..., size]."""
        scaled = F.rms_norm(x if self.is_rounded_first else x.float(), (x.shape[-1],), None, self.eps)
        return (scaled * self.weight).to(x.dtype)
