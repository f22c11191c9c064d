"""Describe a norm, and compute it in plain torch."""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: float32 `weight` [size], by which values that have unit mean square are multiplied. Most
    families round the values to the model's dtype before (`is_rounded_first`), some only the product.

    Or a LayerNorm (`is_layer_norm`): the mean is subtracted first, float32 `bias` [size], if there is one, is
    added to the product, and only the sum is rounded."""

    weight: Tensor
    eps: float
    is_rounded_first: bool = True
    is_layer_norm: bool = False
    bias: Tensor | None = None

    def normed(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x [..., size]."""
        if self.is_layer_norm:
            wide = F.layer_norm(x.float(), (x.shape[-1],), self.weight, self.bias, self.eps)
            return wide.to(x.dtype)
        scaled = F.rms_norm(x if self.is_rounded_first else x.float(), (x.shape[-1],), None, self.eps)
        return (scaled * self.weight).to(x.dtype)
