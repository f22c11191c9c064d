"""A product that passes what it takes to a function before it computes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workers.model.products import Linear

# Takes inputs [num_tokens, num_inputs], and the hidden states [num_tokens, num_outputs] that the result is
# added to, if it is; returns the inputs to compute with.
Passed = Callable[[Tensor, Tensor | None], Tensor]


class WatchedLinear(Linear):
    """A product whose inputs pass through a function."""

    def __init__(self, product: Linear, passed: Passed) -> None:
        self._product, self._passed = product, passed
        self.num_inputs, self.num_outputs = product.num_inputs, product.num_outputs

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._product(self._passed(x, None), out)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        return self._product.add_to(hidden, self._passed(x, hidden))

    def gated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._product.gated(self._passed(x, None), out)

    def floats(self, x: Tensor) -> Tensor:
        return self._product.floats(self._passed(x, None))

    def lookup(self, ids: Tensor) -> Tensor:
        return self._product.lookup(ids)
