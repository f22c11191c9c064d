"""Divide the inputs of a layer's products by factors, and multiply the products' weights by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from workers.quantizer.smoothing_pairs import DividedRows, SharingHeads, SmoothingPair


@dataclasses.dataclass(frozen=True, slots=True)
class LayerFactors:
    """By the names of tensors: what the inputs of weights are multiplied by, float32 [num_inputs], and what
    rows are divided by, float32 [num_rows]. Norms are rounded as they are stored, and inputs make up for it.
    """

    columns: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, tuple[DividedRows, Tensor]] = dataclasses.field(default_factory=dict)

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor with its factors, in float32 where it has some."""
        if (divided := self.rows.get(name)) is not None:
            tensor = _divided(tensor, *divided)
        columns = self.columns.get(name)
        return tensor if columns is None else tensor.float() * columns

    @staticmethod
    def of(factored: Sequence[tuple[SmoothingPair, Tensor]], read: Callable[[str], Tensor]) -> LayerFactors:
        """Apply the factors of each pair of a layer; `read` gives its tensors."""
        columns: dict[str, Tensor] = {}
        rows: dict[str, tuple[DividedRows, Tensor]] = {}
        for pair, factors in factored:
            rows |= {divided.name: (divided, factors) for divided in pair.divided}
            first, of_columns = pair.divided[0], factors
            if pair.heads is not None:
                of_columns = of_all_heads(factors, pair.heads)
            elif (stored := read(first.name)).dim() == 1:
                of_columns = _made_up(stored, first, factors)
            columns |= dict.fromkeys(pair.weights, of_columns)
        return LayerFactors(columns, rows)


def of_all_heads(factors: Tensor, heads: SharingHeads) -> Tensor:
    """Repeat factors of values for the heads of queries that mix them."""
    num_kv_heads, _, head_dim = heads
    return factors.view(num_kv_heads, 1, head_dim).expand(heads).flatten()


def _divided(tensor: Tensor, divided: DividedRows, factors: Tensor) -> Tensor:
    """Divide the rows of a tensor, in float32."""
    wide = tensor.to(torch.float32, copy=True)
    rows = wide[divided.rows]
    rows.add_(divided.offset).div_(factors.view(-1, *[1] * (tensor.dim() - 1))).sub_(divided.offset)
    return wide


def _made_up(stored: Tensor, norm: DividedRows, factors: Tensor) -> Tensor:
    """Return what inputs are multiplied by where the divided norm is rounded as it is stored."""
    now = _divided(stored, norm, factors).to(stored.dtype).float() + norm.offset
    was = stored.float() + norm.offset
    return torch.where(now == 0, factors, was / now)
