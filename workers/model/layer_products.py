"""The products that a decoder layer needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workers.model.linear_weights import LinearWeights
from workers.model.make_linear import make_linear
from workers.model.norm import Norm
from workers.model.products import GatedActivation, Linear
from workers.model.thin_linear import Surroundings

# Maps token ids to rows of the embedding, or hidden states to logits. `workers.model.parallel` replaces both
# by ones that join the parts of several ranks.
Product = Callable[[Tensor], Tensor]


class AddedProduct(Protocol):
    """A product whose result is added to the hidden states: of one rank, or joined by
    `workers.model.parallel`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product of x [num_tokens, num_inputs], [num_tokens, hidden_size]."""

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        """Add the product of x to `hidden` [num_tokens, hidden_size] and return None; or return the product,
        for the norm that follows to add, where that takes fewer kernels."""


class ProductMaker(NamedTuple):
    """Makes the products of a layer. `is_split`: other ranks have other parts of the products, whose sums are
    added by the norms behind them."""

    is_deterministic: bool
    is_split: bool

    def make(
        self,
        part: LinearWeights,
        gate: GatedActivation | None = None,
        around: Surroundings | None = None,
    ) -> Linear:
        """Return a product by itself."""
        is_deterministic = self.is_deterministic
        return make_linear(part.parts, part.bias, gate=gate, is_deterministic=is_deterministic, around=around)

    def of_normed(
        self, part: LinearWeights, norm: Norm | None, gate: GatedActivation | None = None
    ) -> Linear:
        """Return a product of the norm of the hidden states."""
        has_norm = norm is not None and not norm.is_layer_norm and not self.is_split
        return self.make(part, gate, "norm" if has_norm else "none")

    def added(self, part: LinearWeights, norm: Norm | None) -> Linear:
        """Return a product that is added to the hidden states, or whose `norm` is."""
        return self.make(part, None, "addition" if norm is None and not self.is_split else "none")


class JoinedProducts:
    """Computes several products of the same inputs, whose outputs lie one after another."""

    def __init__(self, products: Sequence[Linear]) -> None:
        self.products = tuple(products)
        self._widths = [product.num_outputs for product in products]
        self.num_outputs = sum(self._widths)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute them for x [num_tokens, num_inputs] into `out` [num_tokens, num_outputs]."""
        for product, part in zip(self.products, torch.split(out, self._widths, 1), strict=True):
            product(x, part)
        return out


class ParallelSum:
    """Adds the products of attention and feed-forward in a layer where both take the same normed hidden
    states. `workers.model.parallel` replaces it by one that joins the parts of several ranks."""

    def __init__(self, output: AddedProduct, down: AddedProduct) -> None:
        self.output, self.down = output, down

    def add_to(self, hidden: Tensor, mixed: Tensor, activated: Tensor) -> Tensor | None:
        """Add the products of `mixed` [num_tokens, num_heads * head_dim] and `activated` [num_tokens,
        intermediate_size] to `hidden` [num_tokens, hidden_size]; or return what is left for the norm that
        follows to add, as `AddedProduct.add_to` does."""
        residual = self.output.add_to(hidden, mixed)
        if residual is not None:
            hidden.add_(residual)
        return self.down.add_to(hidden, activated)
