"""Look up the rows of token ids in a table of floats, or of quantized weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.layer_products import Product
from workers.model.make_linear import make_linear
from workers.model.products import Linear
from workers.model.quantization.quantized_weight import QuantizedWeight


class Embedding:
    """Maps token ids [num_tokens] to rows [num_tokens, hidden_size] of `table`."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._table)


class ProductRowsLookup:
    """Maps token ids [num_tokens] to rows of a product's weight, rounded once to `dtype`."""

    def __init__(self, product: Linear, dtype: torch.dtype) -> None:
        self._product, self._dtype = product, dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._product.lookup(tokens).to(self._dtype)


def make_embedding(table: Tensor | QuantizedWeight, dtype: torch.dtype) -> Product:
    """Return the look-up in a table, which is copied, or packed where it is quantized."""
    if isinstance(table, QuantizedWeight):
        return ProductRowsLookup(make_linear(table), dtype)
    return Embedding(table.clone())
