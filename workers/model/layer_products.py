"""The products that a decoder layer needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

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
