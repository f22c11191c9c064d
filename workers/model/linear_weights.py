"""Describe the weights of a linear product, as they are read."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class LinearWeights:
    """The weights of a linear product: `parts` [num_rows, num_inputs], whose rows one after another are the
    outputs, and `bias` [num_outputs]. Parts that need no conversion are views of the mapped checkpoint: only
    valid while their `TensorFiles` are open, and to be packed or copied once."""

    parts: tuple[Tensor, ...]
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """Copy the parts into one weight [num_outputs, num_inputs]."""
        return torch.cat(self.parts)
