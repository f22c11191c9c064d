"""Read the parts of linear products that a rank holds: of their outputs, or of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.linear_weights import LinearWeights
from workers.model.model_config import ModelConfig
from workers.model.tensor_files import TensorFiles, WeightSlice


class ProductRows(NamedTuple):
    """A rank's `rows` of the tensor of a linear product, which has `num_rows` of them."""

    name: str
    num_rows: int
    rows: slice


def fused_rows(name: str, parts: Sequence[ProductRows]) -> list[ProductRows]:
    """Return the rows of products that are stored one after another in one tensor of this name."""
    total, fused, before = sum(it.num_rows for it in parts), [], 0
    for it in parts:
        fused.append(ProductRows(name, total, slice(before + it.rows.start, before + it.rows.stop)))
        before += it.num_rows
    return fused


class SplitProducts:
    """Reads products of a layer for one rank of a stage, of which the first alone holds the biases of those
    that are split by inputs."""

    def __init__(self, files: TensorFiles, config: ModelConfig, tp_rank: int) -> None:
        self.files = files
        self._hidden_size, self._factor = config.hidden_size, config.residual_multiplier
        self._tp_rank = tp_rank

    def of_outputs(self, parts: Sequence[ProductRows], *, has_bias: bool) -> LinearWeights:
        """Join the given rows of several products of the hidden states."""
        hidden = self._hidden_size
        slices = [WeightSlice(f"{it.name}.weight", (it.num_rows, hidden), it.rows) for it in parts]
        biases = [self._vector(f"{it.name}.bias", (it.num_rows,), it.rows) for it in parts if has_bias]
        return LinearWeights(self.files.product_parts(slices), torch.cat(biases) if has_bias else None)

    def of_inputs(self, name: str, size: int, columns: slice, *, has_bias: bool) -> LinearWeights:
        """Read a product whose result is added to the hidden states, times what the family scales it by."""
        hidden, factor = self._hidden_size, self._factor
        bias = self._vector(f"{name}.bias", (hidden,)) if has_bias else None
        parts = self.files.product_parts([WeightSlice(f"{name}.weight", (hidden, size), columns=columns)])
        return LinearWeights(parts, bias if self._tp_rank == 0 else None).times(factor)

    def floats(self, name: str, shape: tuple[int, ...], rows: slice = slice(None)) -> Tensor:
        """Read rows of a tensor in float32."""
        return self.files.tensor(name, shape, rows, dtype=torch.float32).clone()

    def _vector(self, name: str, shape: tuple[int], *slices: slice) -> Tensor:
        return self.files.tensor(name, shape, *slices).clone()
