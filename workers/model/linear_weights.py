"""Describe the weights of a linear product, as they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.weight_parts import scaled

Parts = tuple[Tensor, ...] | tuple[QuantizedWeight, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LinearWeights:
    """The weights of a linear product: `parts` [num_rows, num_inputs], whose rows one after another are the
    outputs, and `bias` [num_outputs]. Quantized parts have one form. Tensors that need no conversion are
    views of the mapped checkpoint: only valid while their `TensorFiles` are open, and to be packed or copied
    once."""

    parts: Parts
    bias: Tensor | None

    @property
    def num_inputs(self) -> int:
        return self.parts[0].shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts of a product that is read as tensors."""
        assert are_tensors(self.parts)
        return self.parts

    @property
    def weight(self) -> Tensor:
        """Copy the parts, which are tensors, into one weight [num_outputs, num_inputs]."""
        return torch.cat(self.tensors)

    def times(self, factor: float) -> LinearWeights:
        """Return the product with its result multiplied."""
        if factor == 1:
            return self
        parts = [scaled(it, factor) if isinstance(it, QuantizedWeight) else it * factor for it in self.parts]
        return LinearWeights(as_parts(parts), None if self.bias is None else self.bias * factor)


def are_tensors(parts: Sequence[Tensor | QuantizedWeight]) -> TypeGuard[tuple[Tensor, ...]]:
    """Whether no part is quantized."""
    return all(isinstance(part, Tensor) for part in parts)


def are_quantized(parts: Sequence[Tensor | QuantizedWeight]) -> TypeGuard[tuple[QuantizedWeight, ...]]:
    """Whether all parts are quantized."""
    return all(isinstance(part, QuantizedWeight) for part in parts)


def as_parts(parts: Sequence[Tensor | QuantizedWeight]) -> Parts:
    """Return the parts of a product, which are of one kind."""
    found = tuple(parts)
    if are_tensors(found):
        return found
    assert are_quantized(found)
    return found
