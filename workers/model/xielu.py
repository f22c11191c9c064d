"""Compute the activation xIELU (https://arxiv.org/abs/2411.13010)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Xielu(NamedTuple):
    """The coefficients of a layer: positive values x become quadratic * x² + linear * x, the others
    exponential * (expm1(min(x, bound)) - x) + linear * x."""

    quadratic: float
    exponential: float
    linear: float
    bound: float

    @staticmethod
    def of(alpha_p: float, alpha_n: float, beta: float, eps: float) -> Xielu:
        """Return the coefficients from parameters as they are stored."""
        soft = F.softplus(torch.tensor([alpha_p, alpha_n], dtype=torch.float64))
        return Xielu(float(soft[0]), beta + float(soft[1]), beta, eps)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Activate x, in float32."""
        wide = x.float()
        above = self.quadratic * wide * wide
        below = (torch.expm1(wide.clamp(max=self.bound)) - wide) * self.exponential
        result = torch.where(wide > 0, above, below).add_(wide, alpha=self.linear).to(x.dtype)
        return result if out is None else out.copy_(result)
